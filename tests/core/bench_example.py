"""A benchmark report with every kind of row, for the tests of its text, its comparison and its plots."""

from __future__ import annotations

from dataclasses import replace

from bwd.core import bench
from bwd.core.bench import Measured, Spread, Workload
from bwd.core.bench_report import Bandwidth, Machine, Report, Row, Seen, Subject

CARD = "NVIDIA GeForce RTX 5090"


def spread(p50: float) -> Spread:
    return Spread(mean=p50 * 1.1, p50=p50, p90=p50 * 1.5, p95=p50 * 2, p99=p50 * 3)


def measured(load: Workload, tokens_per_s: float, itl: float = 8.0) -> Measured:
    output = load.prompts * load.output_tokens
    seconds = output / tokens_per_s
    return Measured(
        workload=load,
        duration_s=seconds,
        completed=load.prompts,
        failed=0,
        input_tokens=load.prompts * load.input_tokens,
        output_tokens=output,
        requests_per_s=load.prompts / seconds,
        tokens_per_s=tokens_per_s,
        total_tokens_per_s=tokens_per_s * 2,
        ttft_ms=spread(40.0),
        itl_ms=spread(itl),
        tpot_ms=spread(itl),
        e2e_ms=spread(1000.0),
    )


def example(rate: float = 120.0, **subject: object) -> Report:
    """Invented numbers: nobody measured them."""
    single, streams, _, _, long, shared = bench.WORKLOADS
    half = measured(streams, rate * 6)
    half = replace(half, completed=15, failed=1, errors=("TimeoutError",))
    power = Seen(0.0, 0.004, 1, 0, 610.0, 655.5)
    failed = "1 of 16 requests failed: TimeoutError"
    rows = (
        Row(single, measured(single, rate * 0.96, 1000 / rate), power, 197.0, rate / 197),
        Row(streams, half, Seen(0.0, 0.03, 8, 0, 700.0, 760.0), 1500.0, rate * 6 / 1500, failed),
        Row(shared, measured(shared, rate * 9), Seen(0.93, 0.02, 16, 0)),
        Row(long, note="no time was left (--minutes)"),
    )
    argv = "/env/bin/python -m vllm --model /m --tensor-parallel-size 2 --uds /s"
    fields = {
        "model": "casperhansen/deepseek-r1-distill-qwen-32b-awq", "engine": "cuda", "version": "0.32.0",
        "ranks": 2, "max_model_len": 32768, "attention": "FLASHINFER", "digest": "d1",
        "argv": tuple(argv.split()),
    } | subject  # fmt: skip
    return Report(
        at="2026-11-30 12:00 UTC",
        command="bwd bench serve",
        machine=Machine(
            "AMD Ryzen Threadripper 7960X", 48, 128 << 30, (CARD, CARD), "580.95", "6.14.0", ("CNS",)
        ),
        subject=Subject(**fields),  # type: ignore[arg-type]
        bandwidth=Bandwidth(1.62e12, "10 copies of 512 MiB, best of 3, the slowest of 2 cards"),
        rows=rows,
        weights=17_770_752_000,
        kv_per_token=262_144,
        streamed="4.156 bits for each of 31.21 G elements, and the output layer in float16",
        notes=("Prompts are drawn from the seeds 7 and following.",),
    )
