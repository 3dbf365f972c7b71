"""Checks of `bwd verify` on the running engine: what it says of itself, and what its processes show."""

from __future__ import annotations

from collections.abc import Callable

from bwd.adapters import process, torch_report
from bwd.commands.verify_case import Case, Check
from bwd.core import checks, engine_facts
from bwd.core.checks import Verdict
from bwd.core.host import format_cpus, parse_cpus

VLLM = "0.32.0"


def engine_version(case: Case) -> Verdict:
    version = str(case.api.get("/version")["version"])
    if case.engine is not None and case.engine.own:
        return checks.ok(f"vLLM {version} (ENGINE_PYTHON)")
    if version.split("+")[0] != VLLM:
        return checks.failed(f"vLLM {version}, this repository is made for {VLLM}")
    return checks.ok(f"vLLM {version}")


def _on_cards(judge: Callable[[Case], Verdict]) -> Callable[[Case], Verdict]:
    """A judgement that only an engine on GPUs gives rise to."""

    def judged(case: Case) -> Verdict:
        if case.engine_kind == "cpu":
            return checks.not_applicable("the CPU engine")
        return judge(case)

    return judged


def attention(case: Case) -> Verdict:
    chosen = case.facts.attention if case.engine_kind != "cpu" else ""
    wanted = case.settings.attention_backend if case.settings is not None else "auto"
    return checks.judge_backend(case.engine_kind, chosen, wanted)


def transport(case: Case) -> Verdict:
    return engine_facts.judge_transport(case.plan, case.facts)


def all_reduce(case: Case) -> Verdict:
    return engine_facts.judge_all_reduce(case.plan, case.facts)


def linear(case: Case) -> Verdict:
    return engine_facts.judge_linear(case.plan, case.facts, case.quantised)


def graphs(case: Case) -> Verdict:
    return engine_facts.judge_graphs(case.plan, case.facts)


def kv_cache(case: Case) -> Verdict:
    return engine_facts.judge_kv(case.plan, case.facts)


def multicast(case: Case) -> Verdict:
    return engine_facts.judge_multicast(case.plan, case.facts, case.environs)


def allocator(case: Case) -> Verdict:
    told = None
    if case.plan.get("engine") == "cuda" and case.environs:
        told = torch_report.allocator_settings(case.plan["python"], case.environs[-1], case.paths.state)
    return engine_facts.judge_allocator(case.plan, told)


def affinity(case: Case) -> Verdict:
    if case.members is None:
        return checks.could_not(f"no run is recorded in {case.paths.run_file}")
    threads: dict[int, frozenset[int]] = {}
    for member in case.members:
        threads.update(process.affinity(member.pid))
    text = str(case.plan.get("cpus") or "")
    planned = parse_cpus(text) if text else None
    seen = frozenset().union(*threads.values()) if threads else frozenset()
    return checks.judge_affinity(planned, threads, format_cpus(frozenset(planned) if planned else seen))


CHECKS = (
    Check("version", "the engine's version", engine_version),
    Check("attention", "the attention backend", attention),
    Check("transport", "the way between the cards (NCCL)", _on_cards(transport)),
    Check("all-reduce", "the all-reduce between the cards", _on_cards(all_reduce)),
    Check("linear", "the kernel for quantised weights", _on_cards(linear)),
    Check("graphs", "CUDA graphs", _on_cards(graphs)),
    Check("kv-cache", "the KV cache against its estimate", kv_cache),
    Check("multicast", "NVLink multicast", _on_cards(multicast)),
    Check("allocator", "torch's allocator, as torch reads it", _on_cards(allocator)),
    Check("affinity", "CPUs of every engine process", affinity),
)
