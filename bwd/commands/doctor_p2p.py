"""`bwd doctor p2p`: may the cards talk to each other directly? Tested with data, not asked."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from bwd import paths as bwd_paths
from bwd.adapters import environments, hostinfo, nvml, p2p, settings_file
from bwd.commands import situation
from bwd.core import checks, visible
from bwd.core import p2p as core
from bwd.core.checks import Outcome, Result
from bwd.core.exit_codes import ExitCode
from bwd.core.host import Gpu, HostFacts
from bwd.core.p2p import Limits, Ran, Step
from bwd.core.settings import Settings
from bwd.errors import BwdError
from bwd.paths import Paths


def run(*, as_json: bool, logs: str | None = None) -> int:
    """Test, print step by step, and store the verdict; what NCCL wrote goes to a folder a step in `logs`.
    0: passed or nothing to test against; 1: a veto; 5: it could not be tested."""
    paths = bwd_paths.find(os.environ).make()
    settings = settings_file.load(paths, os.environ)
    host = hostinfo.read(nvml=nvml.read(), environ=os.environ)
    cards = _cards(settings, host)
    _free(paths, cards)
    env = environments.engine_env("cuda", paths, settings)
    if env is None:
        raise BwdError(
            "the engine's environment is not installed: its NCCL is what is tested",
            hint="run `pixi install -e cuda` or `bwd serve`, or set ENGINE_PYTHON",
            exit_code=ExitCode.UNKNOWN,
        )
    began = time.monotonic()

    def start(step: Step, say: Callable[[str], None]) -> Ran:
        inherited = env.apply(os.environ)
        environ = core.environment(step, settings, host, inherited, str(paths.cache))
        keep = Path(logs).absolute() / step.id if logs else None
        return p2p.run(p2p.argv(env.python, step), environ, Limits(), say, keep)

    done, over = _all(core.steps(cards), start, quiet=as_json)
    results = [result for _, result in done]
    finding = core.conclude(done, time.monotonic() - began, over)
    data = core.record(finding, host, cards, results, datetime.now(UTC).isoformat(timespec="seconds"))
    p2p.keep(paths, data)
    code = checks.exit_code(results)
    if as_json:
        print(json.dumps({**data, "transport": over, "exit_code": int(code)}, indent=2))
    else:
        print(checks.table(results))
        print(f"\n{_MEANS[finding.outcome]}: {finding.why}")
    return code


_MEANS = {
    "passed": "P2P passed; the plan uses it from the next start on",
    "failed": "P2P vetoed; the plan keeps it off (class A) until the next boot or a test that passes",
    "none": "no verdict; the plan goes by what the driver says",
}


def _cards(settings: Settings, host: HostFacts) -> tuple[Gpu, ...]:
    """The cards to test: those that the engine may use. Raises BwdError when there are not two."""
    asked = settings.extra_env.get("CUDA_VISIBLE_DEVICES", host.visible_devices)
    try:
        cards = visible.visible(host.gpus, asked)
    except visible.VisibleError as error:
        raise BwdError(str(error), hint=error.hint, where="CUDA_VISIBLE_DEVICES") from error
    whole = tuple(gpu for gpu in cards if not gpu.mig)
    if len(whole) < 2:
        seen = "; ".join(host.unseen) if host.unseen and not host.gpus else ""
        raise BwdError(
            f"the P2P test needs two NVIDIA GPUs, and there {'is' if len(whole) == 1 else 'are'} "
            f"{len(whole) or 'none'} here" + (f" ({seen})" if seen else ""),
            hint="`bwd doctor` looks at everything else",
            exit_code=ExitCode.UNKNOWN,
        )
    return whole


def _free(paths: Paths, cards: tuple[Gpu, ...]) -> None:
    """Refuse while the cards are in use: the test would disturb, and be disturbed into a false veto."""
    now = situation.look(paths)
    if now.engine is not None:
        raise BwdError(
            f"the engine runs on these cards (pid {now.engine})",
            hint="run `bwd stop` first",
            exit_code=ExitCode.UNKNOWN,
        )
    for gpu in cards:
        if gpu.memory_free < core.MEMORY_NEEDED:
            owners = ", ".join(f"{p.name or 'a process'} (pid {p.pid})" for p in gpu.processes)
            raise BwdError(
                f"GPU {gpu.index} has {gpu.memory_free / (1 << 30):.1f} GiB free and the test needs "
                f"{core.MEMORY_NEEDED >> 30}" + (f"; used by {owners}" if owners else ""),
                hint="end what uses it and try again",
                exit_code=ExitCode.UNKNOWN,
            )


def _all(
    steps: tuple[Step, ...], start: Callable[[Step, Callable[[str], None]], Ran], *, quiet: bool
) -> tuple[list[tuple[Step, Result]], str]:
    """Every step with its result, and over what NCCL moved data when it was free to choose."""
    live = sys.stderr.isatty() and not quiet
    done: list[tuple[Step, Result]] = []
    over = ""
    for number, step in enumerate(steps, 1):
        head = f"{number}/{len(steps)} {step.title}"

        def say(text: str, head: str = head) -> None:
            if live:
                print(f"\r\x1b[2K{head}: {text}", end="", file=sys.stderr, flush=True)

        if not quiet and not live:
            print(f"bwd: {head}", file=sys.stderr, flush=True)
        verdict = core.skipped(step, done, over)
        if verdict is None:
            say("starting")
            try:
                ran = start(step, say)
            except OSError as error:
                verdict = checks.could_not(f"the test does not start: {error.strerror or error}")
            else:
                verdict = core.judge(step, ran)
                if step.child == "reduce" and verdict.outcome == Outcome.OK:
                    over = core.transport(ran.logs)
        done.append((step, Result(step.id, step.title, verdict.outcome, verdict.evidence, verdict.hint)))
    if live:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    return done, over
