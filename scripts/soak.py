"""A fault every minute for an hour: does bwd keep right, and does its memory stay flat?

    python scripts/soak.py                        an hour, report on stdout
    python scripts/soak.py --minutes 5 --report docs/soak.md

The real daemon and the real front with the product's times, and tests/fakes/engine.py as the engine, so
that hundreds of runs fit on a small machine. One limit differs: a failure a minute would be more than
the restart budget allows (3 in 15 minutes, then FATAL), so its window is 50 s here. A client asks all
the time. Exits 1 when a fault was not answered as it should be, or the memory grew.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path

from bwd.core.lifecycle import Policy
from bwd.core.probes import ProbeSpec
from bwd.daemon.world import Limits
from tests.daemon.house import House

POLICY = replace(Policy(), window=50.0)
GROWTH = 3.0
"""MB by which the median of the last quarter may exceed that of the second: the first warms up."""
SAMPLE = 5.0
FLOOD = 200_000


@dataclass(frozen=True, slots=True)
class Played:
    """One fault: `verdict_s` until bwd had its cause, `ready_s` until READY again; None where the fault
    has no such moment. `wrong` says what was not as it should be."""

    at_s: float
    fault: str
    cause: str = ""
    verdict_s: float | None = None
    ready_s: float | None = None
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Size:
    """Of bwd, or of front: resident MB, open descriptors, threads."""

    at_s: float
    mb: float
    fds: int
    threads: int


@dataclass(slots=True)
class Counts:
    answered: int = 0
    refused: int = 0  # 503 while there was no engine
    broken: int = 0  # cut off in the middle


@dataclass(slots=True)
class Soak:
    house: House
    began: float = field(default_factory=time.monotonic)
    played: list[Played] = field(default_factory=list)
    sizes: dict[str, list[Size]] = field(default_factory=lambda: {"bwd": [], "front": []})
    counts: Counts = field(default_factory=Counts)
    over: threading.Event = field(default_factory=threading.Event)
    front: subprocess.Popen[bytes] | None = None
    edits: int = 0

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    # ------------------------------------------------------------------ beside the faults
    def ask(self) -> None:
        """Requests through front, one after the other."""
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 20})
        while not self.over.wait(0.2):
            connection = http.client.HTTPConnection("127.0.0.1", self.house.port, timeout=60)
            try:
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                if answer.status == 200:
                    self.counts.answered += 1
                elif answer.status == 503:
                    self.counts.refused += 1
                else:
                    self.counts.broken += 1
            except (OSError, http.client.HTTPException):
                self.counts.broken += 1
            finally:
                connection.close()

    def watch(self) -> None:
        while not self.over.wait(SAMPLE):
            for name, child in (("bwd", self.house.daemon), ("front", self.front)):
                if child is not None and (size := _size(child.pid, self.now)) is not None:
                    self.sizes[name].append(size)

    # ------------------------------------------------------------------ faults
    def play(self, fault: str) -> None:
        """One fault, and what came of it."""
        at = self.now
        try:
            done = FAULTS[fault](self)
            self.played.append(replace(done, at_s=at, fault=fault))
        except AssertionError as error:
            lines = str(error).splitlines()
            self.played.append(Played(at, fault, wrong=lines[0][:300] if lines else "?"))
        print(json.dumps(asdict(self.played[-1])), flush=True)

    def restarts(self) -> Mapping[str, int]:
        return dict(self.house.status().get("restarts", {}))

    def restarted(self, cause: str, seconds: float = 50.0) -> Played:
        """Wait for the restart by this cause that a fault of now asks for."""
        before, run = self.restarts(), self.house.status()["run"]["number"]
        begun = time.monotonic()
        self.house.until(lambda s: s["phase"] not in ("ready", "suspect"), seconds)
        verdict = time.monotonic() - begun
        self.house.until(lambda s: s["phase"] == "ready" and s["run"]["number"] == run + 1, seconds)
        ready = time.monotonic() - begun
        after = self.restarts()
        found = [name for name, count in after.items() if count > before.get(name, 0)]
        wrong = "" if found == [cause] else f"the cause is {found}, not {cause}"
        return Played(0, "", ",".join(found), verdict, ready, wrong)

    def untouched(self, seconds: float) -> Played:
        """Nothing may come of this fault."""
        before = self.house.status()
        time.sleep(seconds)
        after = self.house.until(lambda s: s["phase"] == "ready", 30)
        same = before["run"]["id"] == after["run"]["id"] and before["restarts"] == after["restarts"]
        return Played(0, "", wrong="" if same else "the engine was restarted")

    @property
    def engine(self) -> int:
        return int(self.house.status()["run"]["pid"])


def _stop(soak: Soak) -> Played:
    os.kill(soak.engine, signal.SIGSTOP)
    return soak.restarted("HUNG")


def _pause(soak: Soak) -> Played:
    pid = soak.engine
    os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    os.kill(pid, signal.SIGCONT)
    return soak.untouched(15)


def _kill(soak: Soak) -> Played:
    os.kill(soak.engine, signal.SIGKILL)
    return soak.restarted("EXITED")


def _end(soak: Soak) -> Played:
    os.kill(soak.engine, signal.SIGTERM)  # vLLM ends with code 0 then, as it does when its engine dies
    return soak.restarted("EXITED")


def _hang(soak: Soak) -> Played:
    soak.house.hang_file.touch()
    try:
        played = soak.restarted("HUNG")
    except AssertionError:
        soak.house.hang_file.unlink(missing_ok=True)
        raise
    soak.house.hang_file.unlink(missing_ok=True)
    return played


def _hang_once(soak: Soak) -> Played:
    """The hang ends with the run: the next must not hang as well."""
    threading.Thread(target=_unhang, args=(soak,), daemon=True).start()
    return _hang(soak)


def _unhang(soak: Soak) -> None:
    with contextlib.suppress(AssertionError):
        soak.house.until(lambda s: s["phase"] not in ("ready", "suspect"), 50)
    soak.house.hang_file.unlink(missing_ok=True)


def _flood(soak: Soak) -> Played:
    """A second writer floods the engine's log."""
    log = Path(soak.house.status()["run"]["log"])
    text = "(APIServer pid=1) INFO 11-30 08:00:00 [loggers.py:1] " + "x" * 150 + "\n"
    with log.open("a") as file:
        for _ in range(FLOOD // 1000):
            file.write(text * 1000)
    return soak.untouched(20)


def _edit(soak: Soak) -> Played:
    """An edit that asks for another plan: drained, and no failure."""
    number = soak.house.status()["run"]["number"]
    before = soak.restarts()
    soak.edits += 1
    begun = time.monotonic()
    soak.house.write_env(f"MAX_NUM_SEQS={2 + soak.edits % 7}")
    soak.house.until(lambda s: s["phase"] == "ready" and s["run"]["number"] == number + 1, 50)
    wrong = "" if soak.restarts() == before else "an edit was counted as a failure"
    return Played(0, "", "", None, time.monotonic() - begun, wrong)


def _bad_edit(soak: Soak) -> Played:
    """A `.env` that is refused: the engine serves on."""
    text = soak.house.env_file.read_text()
    soak.house.env_file.write_text(text + "PORT=abc\nMAX_NUM_SEQS=-1\n")
    soak.house.until(lambda s: s["settings"]["problems"], 20)
    played = soak.untouched(5)
    soak.house.env_file.write_text(text)
    soak.house.until(lambda s: not s["settings"]["problems"], 20)
    return played


def _front(soak: Soak) -> Played:
    """front is killed; supervisord's part, to start it again, is played here."""
    assert soak.front is not None
    soak.front.kill()
    soak.front.wait()
    soak.front = soak.house.start_front()
    return soak.untouched(10)


def _curious(soak: Soak) -> Played:
    """Many questions to the control socket."""
    for _ in range(300):
        assert soak.house.status(), "no status"
    return soak.untouched(2)


FAULTS: Mapping[str, Callable[[Soak], Played]] = {
    "engine stopped": _stop,
    "engine paused for 6 s": _pause,
    "engine killed": _kill,
    ".env edited": _edit,
    "engine hangs": _hang_once,
    "200,000 lines of log at once": _flood,
    "engine ends with code 0": _end,
    ".env broken, then mended": _bad_edit,
    "front killed": _front,
    "300 questions for the status": _curious,
}


def _size(pid: int, now: float) -> Size | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        rows = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        fds = len(os.listdir(f"/proc/{pid}/fd"))
        return Size(now, int(rows["VmRSS"].split()[0]) / 1024, fds, int(rows["Threads"]))
    except (OSError, KeyError, ValueError):
        return None


def growth(sizes: list[Size], seconds: float) -> tuple[Size, Size] | None:
    """The medians of the second and of the last quarter of the time."""

    def median(low: float, high: float) -> Size | None:
        part = [size for size in sizes if low <= size.at_s < high]
        if not part:
            return None
        return Size(
            low,
            statistics.median(s.mb for s in part),
            int(statistics.median(s.fds for s in part)),
            int(statistics.median(s.threads for s in part)),
        )

    first, last = median(seconds / 4, seconds / 2), median(seconds * 3 / 4, seconds + 60)
    return None if first is None or last is None else (first, last)


def report(soak: Soak, seconds: float, command: str) -> str:
    rows = [
        "# A fault every minute",
        "",
        "Written by `scripts/soak.py`: the real daemon and front with the product's times, and the tests'",
        "fake engine. Only the window of the restart budget differs (50 s for 15 min): a failure a minute is",
        "more than the budget allows.",
        "",
        f"    {command}",
        "",
        f"{machine()}, {date.today().isoformat()}; {seconds / 60:.0f} minutes, {len(soak.played)} faults, "
        f"{soak.counts.answered} requests answered, {soak.counts.refused} refused with 503 while there was "
        f"no engine, {soak.counts.broken} cut off with the engine or front that they were in.",
        "",
        "| fault | times | as it should be | verdict, median (worst) | READY again, median (worst) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for fault in FAULTS:
        played = [p for p in soak.played if p.fault == fault]
        if not played:
            continue
        good = sum(not p.wrong for p in played)
        rows.append(
            f"| {fault} | {len(played)} | {good} | {_span([p.verdict_s for p in played])} | "
            f"{_span([p.ready_s for p in played])} |"
        )
    rows += ["", "| memory | second quarter, median | last quarter, median | descriptors | threads |"]
    rows += ["| --- | --- | --- | --- | --- |"]
    for name, sizes in soak.sizes.items():
        if (pair := growth(sizes, seconds)) is not None:
            a, b = pair
            rows.append(
                f"| {name} | {a.mb:.1f} MB | {b.mb:.1f} MB | {a.fds}, {b.fds} | {a.threads}, {b.threads} |"
            )
    wrong = [p for p in soak.played if p.wrong]
    rows += ["", *(f"* {p.at_s:.0f} s, {p.fault}: {p.wrong}" for p in wrong)]
    return "\n".join(rows).rstrip() + "\n"


def _span(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} s ({max(known):.1f} s)" if known else "-"


def machine() -> str:
    """The machine in a few words."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    load = os.getloadavg()[1]
    return f"{os.cpu_count()}-core {os.uname().machine}, {gib:.0f} GB (load average {load:.1f} at the end)"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one fault to the next")
    parser.add_argument("--report", type=Path, help="write the report here as well")
    args = parser.parse_args()
    seconds = args.minutes * 60
    with tempfile.TemporaryDirectory(prefix="bwd-soak-") as folder:
        house = House(Path(folder))
        soak = Soak(house)
        try:
            soak.front = house.start_front()
            house.start({"policy": asdict(POLICY), "limits": asdict(Limits()), "spec": asdict(ProbeSpec())})
            house.ready(seconds=60)
            soak.began = time.monotonic()
            for work in (soak.ask, soak.watch):
                threading.Thread(target=work, daemon=True).start()
            names = list(FAULTS)
            number = 0
            while soak.now < seconds:
                due = number * args.every
                time.sleep(max(0.0, due - soak.now))
                soak.play(names[number % len(names)])
                number += 1
                if args.report:
                    args.report.write_text(report(soak, soak.now, " ".join(["python", *sys.argv])))
            soak.over.set()
            code = house.stop(60)
            left = house.engine_processes()
        finally:
            soak.over.set()
            house.close()
    text = report(soak, soak.now, " ".join(["python", *sys.argv]))
    print(text)
    if args.report:
        args.report.write_text(text)
    pairs = [growth(sizes, soak.now) for sizes in soak.sizes.values()]
    grown = [pair for pair in pairs if pair is not None and pair[1].mb - pair[0].mb > GROWTH]
    return 1 if any(p.wrong for p in soak.played) or grown or code or left else 0


if __name__ == "__main__":
    sys.exit(main())
