"""`bwd serve --dry-run`: the launch plan with the reason beside each line; nothing is started or fetched."""

from __future__ import annotations

import json
import os
import sys

from bwd.core.exit_codes import ExitCode
from bwd.paths import Paths


def run(paths: Paths, *, as_json: bool) -> int:
    """Print the plan that `bwd serve` would launch now. Raises SettingsError and PlanError."""
    from bwd.adapters import hostinfo, nvml, settings_file
    from bwd.commands import planning
    from bwd.core.engine_choice import choose
    from bwd.core.plan_text import render

    settings = settings_file.load(paths, os.environ)
    host = hostinfo.read(nvml=nvml.read(), environ=os.environ)
    choice = choose(settings.engine, host)
    draft = planning.look(paths, settings, choice)
    plan = draft.plan(paths, settings, host)
    notes = [*(warning.line() for warning in settings.warnings), *draft.missing]
    if as_json:
        print(
            json.dumps({**plan.to_dict(), "why": choice.why, "model": draft.named, "notes": notes}, indent=2)
        )
        return ExitCode.OK
    print(render(plan), end="")
    for note in [*([choice.fixable] if choice.fixable else []), *notes]:
        print(f"bwd: note: {note}", file=sys.stderr)
    return ExitCode.OK
