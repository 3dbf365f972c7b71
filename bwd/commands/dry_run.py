"""`bwd serve --dry-run`: the launch plan with the reason beside each line; nothing is started or fetched."""

from __future__ import annotations

import json
import os
import sys

from bwd.core.exit_codes import ExitCode
from bwd.paths import Paths


def run(paths: Paths, *, as_json: bool) -> int:
    """Print the plan that `bwd serve` would launch now. Raises SettingsError and PlanError."""
    from bwd.adapters import environments, hostinfo, nvml, p2p, run_file, settings_file, weights
    from bwd.core import model as models
    from bwd.core.engine_choice import choose, model_id
    from bwd.core.plan import PlanPaths, make_plan
    from bwd.core.plan_text import render

    settings = settings_file.load(paths, os.environ)
    host = hostinfo.read(nvml=nvml.read(), environ=os.environ)
    choice = choose(settings.engine, host)
    env = environments.engine_env(choice.engine, paths, settings)
    named = model_id(settings.model, choice.engine)
    folder = weights.present(paths, named, settings.model_revision)
    facts = None
    if folder is not None and (folder / "config.json").is_file():
        size = sum(p.stat().st_size for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt"))
        config = json.loads((folder / "config.json").read_bytes())
        facts = models.parse(config, name=named, weight_bytes=size or None)
    where = PlanPaths(
        python=str(
            env.python
            if env is not None
            else environments.places(choice.engine, paths)[-1] / "bin" / "python"
        ),
        model_path=str(folder if folder is not None else paths.models / named),
        uds=str(paths.engine_socket),
        cache=str(paths.cache),
        site=str(paths.engine_site),
    )
    remembered = run_file.read_json(paths.remembered)
    plan = make_plan(
        settings, host, facts, where,
        remembered=remembered if isinstance(remembered, dict) else None, p2p_verdict=p2p.verdict(paths),
    )  # fmt: skip
    missing = [
        *(
            []
            if env is not None
            else [f"the {choice.engine} environment is not installed yet; serve installs it"]
        ),
        *(
            []
            if facts is not None
            else [f"the weights of {named} are not here yet; what they decide is not final"]
        ),
    ]
    notes = [*(warning.line() for warning in settings.warnings), *missing]
    if as_json:
        print(json.dumps({**plan.to_dict(), "why": choice.why, "model": named, "notes": notes}, indent=2))
        return ExitCode.OK
    print(render(plan), end="")
    for note in [*([choice.fixable] if choice.fixable else []), *notes]:
        print(f"bwd: note: {note}", file=sys.stderr)
    return ExitCode.OK
