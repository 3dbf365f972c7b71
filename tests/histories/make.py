"""Makes the generated histories: `python -m tests.histories.make` writes generated.jsonl beside this file.

Starts follow measured times and real lines (2x H200 and a CPU machine, vLLM 0.32.0, 2026-11-30); serving
follows engine models (tests/core/probe_stories.py, and seeded ones). Every one is marked as generated;
what was recorded from a real engine is in recorded-*.jsonl.
"""

# ruff: noqa: E501  (lines of a log are as long as they are)

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

from bwd.core.probe_values import Sample
from tests.core.probe_play import Engine, watch
from tests.core.probe_stories import WATCHED

HERE = Path(__file__).parent
LONGEST = 900.0  # seconds of serving that are written down

Record = dict[str, Any]


def vllm(proc: str, file: str, message: str, level: str = "INFO") -> str:
    return f"({proc} pid=512) {level} 11-30 08:00:00 [{file}] {message}"


SHM = (
    "No available shared memory broadcast block found in {} seconds. This typically happens when some processes are "
    "hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization)."
)


def start(
    *, gpu: bool, load: float, compiled: float, ready: float, shm: tuple[float, ...] = (), every: int = 60,
    graphs: bool = True, shards: int = 1,
) -> list[Record]:  # fmt: skip
    """The lines of a start: weights from 20 s on for `load` seconds, compiled at `compiled`, API up at
    `ready`; SHM lines at `shm`."""
    worker = "Worker_TP0"
    said: list[tuple[float, str]] = [
        (6.0, vllm("APIServer", "api_utils.py:286", "non-default args: {'tensor_parallel_size': 2}")),
        (7.0, vllm("APIServer", "model.py:733", "Resolved architecture: Qwen2ForCausalLM")),
        (12.0, vllm("EngineCore", "core.py:133", "Initializing a V1 LLM engine (v0.32.0) with config: x")),
        (
            18.0,
            vllm(
                worker,
                "parallel_state.py:1906",
                "world_size=2 rank=0 local_rank=0 backend=" + ("nccl" if gpu else "gloo"),
            ),
        ),
        *([(19.0, vllm(worker, "pynccl.py:111", "vLLM is using nccl==2.29.7"))] if gpu else []),
        (
            20.0,
            vllm(
                worker,
                "gpu_model_runner.py:5040" if gpu else "cpu_model_runner.py:68",
                "Starting to load model m...",
            ),
        ),
    ]
    for shard in range(1, shards + 1):
        percent = 100 * shard // shards
        bar = (
            f"Loading safetensors checkpoint shards: {percent:3}% Completed | {shard}/{shards} [00:01<00:00]"
        )
        said.append((20.0 + load * shard / shards, bar))
    said.append(
        (20.5 + load, vllm(worker, "default_loader.py:501", f"Loading weights took {load:.2f} seconds"))
    )
    if gpu:
        said.append(
            (
                21 + load,
                vllm(
                    worker,
                    "gpu_model_runner.py:5150",
                    f"Model loading took 9.35 GiB memory and {load:.1f} seconds",
                ),
            )
        )
        said.append(
            (
                compiled,
                vllm(worker, "monitor.py:20", f"torch.compile took {compiled - load - 21:.2f} s in total"),
            )
        )
        said.append(
            (compiled + 5, vllm(worker, "gpu_worker.py:760", "Available KV cache memory: 112.30 GiB"))
        )
    else:
        said.append(
            (21 + load, vllm(worker, "cpu_model_runner.py:87", "Warming up model for the compilation..."))
        )
        said.append((compiled, vllm(worker, "cpu_model_runner.py:91", "Warming up done.")))
    said += [(t, vllm("EngineCore", "shm_broadcast.py:871", SHM.format(every))) for t in shm]
    said.append(
        (
            ready - 20 if gpu else ready - 2,
            vllm(
                "EngineCore",
                "kv_cache_utils.py:2327",
                "GPU KV cache size: 918,000 tokens, Maximum concurrency",
            ),
        )
    )
    if gpu and graphs:
        said.append(
            (
                ready - 3,
                vllm(
                    worker, "gpu_model_runner.py:6582", "Graph capturing finished in 16 secs, took 1.13 GiB"
                ),
            )
        )
    said.append(
        (
            ready - 1,
            vllm(
                "EngineCore",
                "core.py:402",
                f"init engine (profile, create kv cache, warmup model) took {ready - 21:.2f} s",
            ),
        )
    )
    said.append((ready, "INFO:     Application startup complete."))
    records = [{"t": t, "line": text} for t, text in sorted(said)]
    return [*records, {"t": ready + 0.5, "event": "answering"}]


STARTS: dict[str, list[Record]] = {
    **{
        f"2x H200, cold, {n} SHM lines": start(gpu=True, load=4.1, compiled=75, ready=287, shm=(105, 209, 269, 280)[:n])
        for n in (1, 2, 3, 4)
    },
    "2x H200, compiled graphs cached": start(gpu=True, load=4.4, compiled=37, ready=74),
    "2x H200, plain NCCL": start(gpu=True, load=3.6, compiled=36, ready=70.5),
    "2x H200, eager": start(gpu=True, load=3.8, compiled=25, ready=45, graphs=False),
    "2x H200, Triton attention, cold, 1 SHM line": start(gpu=True, load=4.1, compiled=69, ready=131, shm=(92,)),
    "1x H200, cold": start(gpu=True, load=5.8, compiled=65, ready=121),
    "two cards, FlashInfer's first JIT of 15 minutes": start(gpu=True, load=30, compiled=120, ready=1100, shm=tuple(range(180, 1080, 60))),
    "two cards, weights from a slow disk for 14 minutes": start(gpu=True, load=840, compiled=920, ready=990, shards=40),
    "CPU, compile 60 s, SHM line every 60 s": start(gpu=False, load=0.3, compiled=82, ready=95, shm=(81,)),
    "CPU, compile 60 s, SHM line every 10 s": start(gpu=False, load=0.3, compiled=82, ready=95, shm=tuple(range(31, 82, 10)), every=10),
    "CPU, compile 60 s, SHM line every 5 s": start(gpu=False, load=0.3, compiled=82, ready=95, shm=tuple(range(26, 82, 5)), every=5),
    "CPU, AOT compile 72 s": start(gpu=False, load=0.3, compiled=60, ready=72, shm=(55,)),
    "CPU, eager": start(gpu=False, load=0.3, compiled=21.5, ready=24),
}  # fmt: skip


def seeded(seed: int) -> Engine:
    """A day in the life: bursts, short pauses, long steps with the devices at work, a queue."""
    rng = random.Random(seed)
    load, frozen, stopped, computing, t = [], [], [], [], 20.0
    while t < LONGEST:
        long = rng.uniform(5, 120)
        load.append((t, t + long))
        kind = rng.choice(["nothing", "pause", "step", "nothing"])
        at = t + rng.uniform(1, long)
        if kind == "pause":
            spell = (at, at + rng.uniform(0.5, 8.5))
            frozen.append(spell)
            stopped.append(spell)
        elif kind == "step":
            spell = (at, at + rng.uniform(5, 90))
            frozen.append(spell)
            computing.append(spell)
        t += long + rng.uniform(100, 200)
    return Engine(
        load=tuple(load), frozen=tuple(frozen), stopped=tuple(stopped), computing=tuple(computing),
        queue=rng.choice([0.0, 2.0, 30.0]), rate=float(rng.choice([5, 50, 4000])), running=rng.choice([1, 8, 200]),
        shm=tuple(rng.uniform(50, LONGEST) for _ in range(rng.randint(0, 5))),
    )  # fmt: skip


def fields(sample: Sample) -> Record:
    """A sample as a record holds it, whole."""
    whole = asdict(sample)
    for name in ("stopped", "gone"):
        whole[name] = [[p["pid"], p["name"]] for p in whole[name]]
    canary = sample.canary
    whole["canary"] = (
        None if canary is None else [str(canary.outcome), round(canary.started, 2), round(canary.ended, 2)]
    )
    whole["canary_since"] = None if sample.canary_since is None else round(sample.canary_since, 2)
    whole["counters"] = (
        None
        if sample.counters is None
        else {k: v for k, v in asdict(sample.counters).items() if v is not None}
    )
    for name in ("suspicions", "could_not"):
        whole[name] = list(whole[name])
    whole["asleep"] = round(sample.asleep, 2)
    return whole


ONCE: Record = {"canary": None, "suspicions": [], "asleep": 0.0}


def shift(sample: Record, by: float) -> Record:
    moved = dict(sample)
    if moved["canary"] is not None:
        moved["canary"] = [
            moved["canary"][0],
            round(moved["canary"][1] + by, 2),
            round(moved["canary"][2] + by, 2),
        ]
    if moved["canary_since"] is not None:
        moved["canary_since"] = round(moved["canary_since"] + by, 2)
    return moved


def folded(samples: Iterator[tuple[float, Record]]) -> Iterator[Record]:
    """Samples as differences, runs of them as one record."""
    last: Record = {}
    run: Record | None = None
    for t, whole in samples:
        differ = {k: v for k, v in whole.items() if k not in ONCE and v != last.get(k)}
        once = {k: v for k, v in whole.items() if k in ONCE and v != ONCE[k]}
        old, new = last.get("counters"), whole["counters"]
        grow: Record = {}
        if old is not None and new is not None and "counters" in differ:
            differ["counters"] = {k: v for k, v in new.items() if old.get(k) != v}
            if set(differ) == {"counters"}:
                grow = {k: round(v - old.get(k, 0.0), 6) for k, v in differ["counters"].items()}
        again = not once and (not differ or bool(grow))
        if run is not None and again:
            every = round(t - run["until"], 6)
            if run.get("every", every) == every and run.get("grow", grow) == grow:
                run.update(every=every, until=t, grow=grow)
                last = whole
                continue
        if run is not None:
            yield tidy(run)
        run = {"t": t, "until": t, "sample": {**differ, **once}}
        last = whole
    if run is not None:
        yield tidy(run)


def tidy(run: Record) -> Record:
    if run["until"] == run["t"]:
        del run["until"]
    if not run.get("grow"):
        run.pop("grow", None)
    return run


def serve(engine: Engine, until: float, after: float, **spec: Any) -> Iterator[Record]:
    watched = (
        (round(t + after, 2), shift(fields(s), after))
        for t, s, _ in watch(whole_tokens(engine), until, **spec)
    )
    return folded(watched)


def whole_tokens(engine: Engine) -> Engine:
    class Whole(Engine):
        def tokens(self, t: float) -> float:
            return float(round(super().tokens(t)))

    return Whole(**{k: getattr(engine, k) for k in Engine.__dataclass_fields__})


def histories() -> Iterator[tuple[Record, list[Record]]]:
    """(what it is, its records). `hung` is None for a healthy one."""
    short = STARTS["2x H200, compiled graphs cached"]
    quiet = Engine(load=((5.0, 60.0),))
    for name, lines in STARTS.items():
        after = float(lines[-1]["t"])
        yield {"history": f"start: {name}", "hung": None}, [*lines, *serve(quiet, 120, after)]
    for seed in range(12):
        after = float(short[-1]["t"])
        yield (
            {"history": f"serving, seed {seed}", "hung": None},
            [*short, *serve(seeded(seed), LONGEST, after)],
        )
    for name, watched in WATCHED.items():
        after = float(short[-1]["t"])
        until = min(watched.until, LONGEST if watched.until < 3600 else 3600.0)
        if watched.hung is not None:
            until = watched.until
        if any(b - a > until for a, b in watched.engine.asleep) and watched.hung is None:
            until = watched.until
        hung = None if watched.hung is None else [watched.hung[0] + after, watched.hung[1] + after]
        what: Record = {"history": f"serving: {name}", "hung": hung}
        if watched.spec.step_tokens != 2048:
            what["spec"] = {
                "step_tokens": watched.spec.step_tokens,
                "prefill_rate": watched.spec.prefill_rate,
            }
        yield what, [*short, *serve(watched.engine, until, after, spec=watched.spec)]
    stuck = [r for r in STARTS["2x H200, cold, 4 SHM lines"] if float(r["t"]) < 20]
    yield (
        {
            "history": "start: the communicator stands still",
            "hung": [139.0, 139.0],
            "cause": "STUCK_COMMUNICATOR",
        },
        [*stuck, {"t": 900.0, "note": "nothing"}],
    )
    warming = [r for r in STARTS["2x H200, cold, 4 SHM lines"] if float(r["t"]) < 280]
    yield (
        {"history": "start: the capture stands still", "hung": [2700.0, 2700.0], "cause": "STUCK_START"},
        [*warming, {"t": 3000.0, "note": "nothing"}],
    )
    after = float(short[-1]["t"])
    gone = vllm(
        "EngineCore",
        "multiproc_executor.py:315",
        "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
        "ERROR",
    )
    died = [
        *serve(replace(quiet, load=((5.0, inf),)), 60, after),
        {"t": after + 60.1, "line": gone},
        {"t": after + 69, "event": "exited", "code": 0},
    ]
    yield (
        {
            "history": "serving: a worker dies and the engine exits with 0",
            "hung": [after + 69, after + 69],
            "cause": "WORKER_DIED",
        },
        [*short, *died],
    )
    lost = "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    off = [*serve(replace(quiet, load=((5.0, inf),)), 60, after), {"t": after + 60.1, "kernel": lost}]
    yield (
        {
            "history": "serving: a card falls off the bus",
            "hung": [after + 60.1, after + 60.1],
            "cause": "XID_LOST",
        },
        [*short, *off],
    )


def main() -> None:
    with (HERE / "generated.jsonl").open("w") as out:
        for what, records in histories():
            out.write(json.dumps({**what, "origin": "generated"}) + "\n")
            out.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
