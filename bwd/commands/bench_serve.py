"""`bwd bench serve`: load the running endpoint, look on, and write down what came of it."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bwd import paths as bwd_paths
from bwd.adapters import bandwidth
from bwd.adapters.load import Load, LoadError, Progress
from bwd.adapters.load_watch import LoadWatch
from bwd.commands import bench as command
from bwd.commands import bench_target, situation
from bwd.commands.bench_target import Target
from bwd.core import bench, bench_report, roofline
from bwd.core.bench import Workload
from bwd.core.bench_report import Bandwidth, Report, Row
from bwd.core.exit_codes import ExitCode
from bwd.core.roofline import Streamed
from bwd.errors import BwdError

LONGEST_LOAD_S = 900.0
"""Of one load: 128 streams of a slow CPU engine take some minutes in their quick lengths."""
_WARM_UP_S = 300.0
_SAY_EVERY_S = 30.0
"""Between two lines of progress where no terminal draws over the last."""


def run(args: argparse.Namespace) -> int:
    loads = _named(args.load)
    if args.minutes <= 0:
        raise BwdError("--minutes has to be more than 0", exit_code=ExitCode.USAGE)
    if args.rounds is not None and args.rounds < 1:
        raise BwdError("--rounds has to be 1 or more", exit_code=ExitCode.USAGE)
    paths = bwd_paths.find(os.environ)
    target = bench_target.find(paths)
    began = time.time()
    folder = _folder(args.out, target, began)
    quick = args.quick or (target.engine == "cpu" and not args.full)
    trial = Trial(target, folder, args.seed if args.seed is not None else int(began), args.minutes * 60)
    speed = _bandwidth(args.bandwidth, target)
    asked = [bench.rounds(bench.quick(load) if quick else load, args.rounds) for load in loads]
    rows, interrupted = _measured(trial, asked, speed)
    moved = trial.moved
    report = Report(
        at=time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(began)),
        command=_again(args, quick),
        machine=target.machine(),
        subject=target.subject(),
        bandwidth=speed,
        rows=rows,
        weights=moved.weights,
        kv_per_token=moved.kv_per_token,
        streamed=moved.why,
        quick=quick,
        notes=tuple(trial.notes(rows)),
    )
    plots, why = command.write(report, folder)
    _show(report, folder, plots, why, as_json=args.json)
    if interrupted:
        return ExitCode.INTERRUPTED
    good = all(row.measured is not None and row.measured.right for row in rows if row.note != trial.no_time)
    return ExitCode.OK if good and any(row.measured for row in rows) else ExitCode.FAILED


def _measured(trial: Trial, loads: Sequence[Workload], speed: Bandwidth) -> tuple[tuple[Row, ...], bool]:
    """The rows, and whether Ctrl-C ended them: what was measured until then is not thrown away."""
    rows: list[Row] = []
    try:
        for row in trial.rows(loads, speed):
            rows.append(row)
    except KeyboardInterrupt:
        _clear()
        if not rows:
            raise
    left = [Row(load, note=trial.interrupted) for load in loads[len(rows) :]]
    return (*rows, *left), bool(left)


class Trial:
    """The loads of one report, one after another, within `seconds`."""

    no_time = "no time was left (--minutes)"
    interrupted = "it was interrupted"

    def __init__(self, target: Target, folder: Path, seed: int, seconds: float) -> None:
        self.target, self.folder, self.seed = target, folder, seed
        self._end = time.monotonic() + seconds
        self._no_power = ""
        facts = target.facts
        if facts is None:
            self.moved = Streamed(None, 0, f"{target.folder}/config.json is not to be read")
        else:
            self.moved = roofline.streamed(facts, target.flag("--kv-cache-dtype") or "auto")

    def rows(self, loads: Sequence[Workload], speed: Bandwidth) -> Iterator[Row]:
        log = self.folder / "load.log"
        with Load(self.target.python, self.target.environ, log=log, key=self.target.key) as load:
            self._warm_up(load)
            for workload in loads:
                # by its name, not its place: two runs of one seed send the same, whatever else they send
                yield self._row(load, workload, bench.names().index(workload.name), speed)

    def _warm_up(self, load: Load) -> None:
        _say("loading vLLM's load generator, and a first few requests that are not counted")
        load.start()
        fitting = bench.fit(bench.WARM_UP, self.target.max_model_len)
        if fitting is not None:
            self._send(load, fitting, -1, min(_WARM_UP_S, self._left()), None)

    def _row(self, load: Load, asked: Workload, number: int, speed: Bandwidth) -> Row:
        workload = bench.fit(asked, self.target.max_model_len)
        if workload is None:
            return Row(asked, note=f"max_model_len {self.target.max_model_len} is too short for it")
        if self._left() < 5:
            return Row(workload, note=self.no_time)
        name = workload.label or workload.name
        lengths = f"{workload.input_tokens} + {workload.output_tokens} tokens"
        _say(f"{name}: {workload.prompts} requests of {lengths}")
        watch = LoadWatch(self.target.counters, self.target.cards)
        try:
            with watch:
                limit = min(LONGEST_LOAD_S, self._left())
                measured = self._send(load, workload, number, limit, _shown(name))
        except LoadError as error:
            _clear()
            return Row(workload, note=self.no_time if self._left() < 5 else str(error))
        _clear()
        self._no_power = self._no_power or watch.no_power
        seen = bench_report.seen(watch.before, watch.after, watch.during, watch.power)
        bound = self._ceiling(workload, speed)
        ratio = roofline.ratio(measured.decode_tokens_per_s, bound)
        trouble = "; ".join(measured.errors)
        note = "" if measured.right else f"{measured.failed} of {workload.prompts} requests failed: {trouble}"
        return Row(workload, measured, seen, bound, ratio, note)

    def _send(
        self, load: Load, workload: Workload, number: int, timeout: float, progress: Progress | None
    ) -> bench.Measured:
        return load.run(
            workload,
            endpoint=self.target.endpoint,
            model=self.target.model,
            tokenizer=str(self.target.folder),
            seed=(self.seed + number) % (1 << 31),
            timeout=timeout,
            on_progress=progress,
        )

    def _ceiling(self, workload: Workload, speed: Bandwidth) -> float | None:
        facts = self.target.facts
        if facts is None:
            return None
        subject = self.target.subject()
        # each replica of the CPU engine reads the same memory; cards have one of their own each
        ranks = subject.ranks if self.target.cards else 1
        return roofline.ceiling(
            facts,
            self.moved,
            bandwidth=speed.bytes_per_s,
            ranks=ranks,
            replicas=subject.replicas if self.target.cards else 1,
            streams=workload.streams,
            context=workload.context,
        )

    def _left(self) -> float:
        return self._end - time.monotonic()

    def notes(self, rows: Sequence[Row]) -> Iterator[str]:
        yield f"Prompts are drawn from the seeds {self.seed} and following."
        yield f"Power: {f'not measured ({self._no_power})' if self._no_power else 'of all cards, by NVML'}."
        for row in rows:
            if row.note and row.measured is not None:
                yield f"{row.workload.label}: {row.note}."
            queued = row.seen.running_most
            if queued is not None and row.measured is not None and queued < row.workload.streams * 0.9:
                yield (
                    f"{row.workload.label}: at most {queued} of {row.workload.streams} streams were seen"
                    " running at once (looked once a second; MAX_NUM_SEQS or the KV cache may bound them)."
                )
            if row.seen.acceptance is not None:
                yield f"{row.workload.label}: {100 * row.seen.acceptance:.0f} % of drafted tokens were kept."
        if self.target.flag("--speculative-config"):
            yield "Speculation is on: a step may give several tokens, and the roofline is no bound."
        now = situation.look(self.target.paths, whole=False).status or {}
        if str((now.get("run") or {}).get("id") or "") != self.target.run_id:
            yield "**The engine was started anew while it was measured**: `bwd history` says why."


def _named(asked: Sequence[str]) -> tuple[Workload, ...]:
    unknown = [name for name in asked if name not in bench.names()]
    if unknown:
        raise BwdError(
            f"there is no load {unknown[0]!r}",
            hint=f"the loads are {', '.join(bench.names())}",
            exit_code=ExitCode.USAGE,
        )
    return bench.chosen(list(dict.fromkeys(asked)))


def _bandwidth(stated: float | None, target: Target) -> Bandwidth:
    if stated is not None:
        if stated <= 0:
            raise BwdError("--bandwidth has to be more than 0", exit_code=ExitCode.USAGE)
        return Bandwidth(stated * 1e9, "as given with --bandwidth")
    host = not target.cards
    _say(f"measuring how fast {'the host' if host else 'each card'} copies memory")
    found = bandwidth.measure(target.python, target.environ, host=host)
    _clear()
    return found


def _folder(out: str | None, target: Target, began: float) -> Path:
    if out:
        folder = Path(out).expanduser().absolute()
    else:
        model = re.sub(r"[^\w.-]+", "-", target.model.rsplit("/", 1)[-1]).strip("-.")[:60] or "model"
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(began))
        folder = target.paths.state / "bench" / f"{stamp}-{model}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "load.log").touch()
    except OSError as error:
        raise BwdError(
            f"cannot write to {folder}: {error.strerror or error}", where="--out" if out else "BWD_STATE_DIR"
        ) from error
    return folder


def _again(args: argparse.Namespace, quick: bool) -> str:
    size = ["--quick"] if quick else ["--full"] if args.full else []
    size += ["--rounds", str(args.rounds)] if args.rounds is not None else []
    return " ".join(["bwd bench serve", *args.load, *size])


def _show(report: Report, folder: Path, plots: Sequence[str], why: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**report.to_dict(), "folder": str(folder), "plots": list(plots)}, indent=2))
        return
    print(bench_report.text_table(report))
    for row in report.rows:
        if row.measured is not None and row.note:
            print(f"{row.workload.label}: {row.note}")
    print(f"\nreport: {folder / 'report.md'}")
    if why:
        print(f"no plots: {why.replace('DIR', str(folder))}")


# ------------------------------------------------------------------ progress, on standard error
def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text} ...", end="", file=sys.stderr, flush=True)
    else:
        print(f"bench: {text}", file=sys.stderr, flush=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _shown(name: str) -> Progress:
    live, last = sys.stderr.isatty(), [0.0]

    def show(done: int, total: int, seconds: float) -> None:
        text = f"{name}: {done}/{total} requests, {seconds:.0f} s"
        if live:
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
        elif seconds - last[0] >= _SAY_EVERY_S:
            last[0] = seconds
            print(f"bench: {text}", file=sys.stderr, flush=True)

    return show
