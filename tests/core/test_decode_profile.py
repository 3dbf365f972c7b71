"""Where a step of decoding spends its time: out of small traces made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bwd.core import decode_profile
from bwd.core.decode_profile import GAP, Steps, TraceError

Event = dict[str, Any]
MARK = "execute_context_0(0)_generation_1(1)"


def event(cat: str, name: str, ts: float, dur: float, tid: int = 7) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def step(at: float) -> list[Event]:
    """100 us: 40 of a quantised product, 20 of an all-reduce, 10 of sampling, 30 of nothing."""
    return [
        event("gpu_user_annotation", MARK, at, 60),
        event("kernel", "void cutlass::device_kernel<machete::MacheteKernelTemplate<half>>", at, 40),
        event("kernel", "void vllm::cross_device_reduce_1stage<half, 2>", at + 40, 20),
        event("kernel", "_gumbel_sample_kernel", at + 80, 10),
        # the host runs ahead of the card
        event("user_annotation", MARK, at - 55, 20),
        event("cpu_op", "aten::empty", at - 50, 5),
    ]


def steps(count: int) -> list[Event]:
    return [one for number in range(count) for one in step(1000.0 + 100 * number)]


def us(found: Steps) -> dict[str, float]:
    return {part.name: part.us for part in found.parts}


def test_a_step_is_shared_out_by_kinds_of_kernels_and_what_is_left_is_a_gap() -> None:
    found = decode_profile.read(steps(6))
    assert (found.count, found.step_us, found.on_card, found.streams) == (4, 100.0, True, 1)
    assert us(found) == {"all-reduce": 20, "quantised matrix products": 40, "sampling": 10, GAP: 30}


def test_the_last_step_has_no_end_and_is_not_counted() -> None:
    assert decode_profile.read(steps(3)).count == 2


def test_kernels_that_run_beside_each_other_leave_no_gap_twice() -> None:
    beside = [event("kernel", "Memcpy DtoH", 1000.0 + 100 * number, 70) for number in range(4)]
    found = decode_profile.read([*steps(4), *beside])
    assert us(found)[GAP] == 20
    assert us(found)["copies"] == 70


def test_a_step_with_a_prompt_in_it_is_left_out() -> None:
    events = steps(6)
    events[6]["name"] = "execute_context_1(512)_generation_1(1)"
    assert decode_profile.read(events).count == 3


def test_steps_of_another_batch_than_most_are_left_out() -> None:
    events = steps(6)
    events[24]["name"] = "execute_context_0(0)_generation_2(2)"
    found = decode_profile.read(events)
    assert (found.streams, found.count) == (1, 3)


def test_without_marks_of_the_card_those_of_the_host_cut_the_steps() -> None:
    events = [one for one in steps(6) if one["cat"] != "gpu_user_annotation"]
    assert decode_profile.read(events).step_us == 100


def test_operators_of_a_host_count_without_those_inside_them() -> None:
    events: list[Event] = []
    for number in range(3):
        at = 100.0 * number
        events += [
            event("user_annotation", MARK, at, 90),
            event("cpu_op", "aten::linear", at + 10, 50),
            event("cpu_op", "aten::addmm", at + 20, 30),
            event("cpu_op", "aten::copy_", at + 25, 5),
            event("cpu_op", "aten::silu", at + 70, 10),
        ]
    found = decode_profile.read(events)
    assert not found.on_card
    assert {part.name: part.count for part in found.kernels}["aten::linear"] == 1
    assert us(found) == {"norm and activation": 10, "dense matrix products": 45, "copies": 5, GAP: 40}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void marlin::Marlin<half, 8, 128>", "quantised matrix products"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "dense matrix products"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("kernel_unified_attention_3d", "attention"),
        ("ncclDevKernel_AllReduce_Sum_f16_RING_LL(...)", "all-reduce"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_2", "norm and activation"),
        ("_compute_slot_mappings_kernel", "preparing the step"),
        ("void at::native::reduce_kernel<ArgMaxOps>", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("something_new", "other"),
    ],
)
def test_the_kind_of_a_kernel(name: str, kind: str) -> None:
    assert decode_profile.kind(name) == kind


def test_a_trace_without_steps_says_so() -> None:
    with pytest.raises(TraceError, match="no two steps of decoding"):
        decode_profile.read([event("kernel", "marlin", 0, 10)])
    with pytest.raises(TraceError, match="no kernel"):
        decode_profile.read([event("user_annotation", MARK, at, 10) for at in (0.0, 100.0)])


def test_the_table_has_the_kinds_and_the_longest_kernels() -> None:
    text = "\n".join(decode_profile.table(decode_profile.read(steps(6)), "rank 0", most=1))
    assert (
        "4 steps of 1 stream: 100 us on average, median 100 (10,000.0 tokens/s under the profiler)." in text
    )
    assert "| all-reduce | 1 | 20.0 | 20.0 % |" in text
    assert "| nothing runs |  | 30.0 | 30.0 % |" in text
    assert text.count("MacheteKernelTemplate") == 1
    assert "cross_device_reduce" not in text
