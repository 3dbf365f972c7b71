"""What decides a build, as values: architectures, jobs, the key of a wheel, progress, and why it failed."""

from __future__ import annotations

import pytest

from bwd.core import build
from bwd.core.build import GIB, NinjaStep
from bwd.core.problem import Problem

SOURCE = {"kind": "source", "source": "aa", "patches": "bb", "torch": "2.13.0", "archs": "12.0"}


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("12.0", ("12.0",)),
        ("sm_120", ("12.0",)),
        ("120", ("12.0",)),
        ("sm120a", ("12.0",)),
        ("12.0f", ("12.0",)),
        ("compute_90a", ("9.0",)),
        ("12.1", ("12.0",)),  # the family code of 12.0 runs on 12.1
        ("10.3", ("10.0",)),
        ("12.0;9.0", ("9.0", "12.0")),
        ("8.9 12.0, 9.0", ("8.9", "9.0", "12.0")),
        ("12.0;12.0", ("12.0",)),
    ],
)
def test_an_architecture_may_be_written_as_people_write_it(text: str, archs: tuple[str, ...]) -> None:
    assert build.parse_arch(text, ".env:3") == archs


@pytest.mark.parametrize("text", ["13.0", "7.5", "blackwell", "rtx5090", "", "12", "12.0.0"])
def test_an_unknown_architecture_is_refused_with_the_known_ones(text: str) -> None:
    problem = build.parse_arch(text, ".env:3")
    assert isinstance(problem, Problem)
    assert problem.line().startswith(".env:3 BUILD_ARCH: ")
    assert "12.0 (RTX 50" in problem.hint


@pytest.mark.parametrize(
    ("cards", "archs"),
    [
        ([], ("12.0",)),
        ([(12, 0), (12, 0)], ("12.0",)),
        ([(9, 0)], ("9.0",)),
        ([(12, 0), (8, 9)], ("8.9", "12.0")),
        ([(12, 1)], ("12.0",)),
        ([(6, 1)], ("12.0",)),
    ],
)
def test_the_cards_decide_the_architectures(cards: list[tuple[int, int]], archs: tuple[str, ...]) -> None:
    assert build.arch_of(cards) == archs


@pytest.mark.parametrize(
    ("cpus", "gib", "setting", "archs", "count", "threads", "heavy"),
    [
        (2, 24, None, 1, 2, 1, 1),  # the small machine still finishes
        (48, 128, None, 1, 42, 1, 4),  # a 7960X with 128 GiB: what the seed used
        (32, 250, None, 1, 32, 1, 4),
        (24, 64, None, 1, 18, 1, 3),
        (16, 16, None, 1, 3, 1, 1),
        (16, 8, None, 1, 1, 1, 1),
        (4, 2, None, 1, 1, 1, 1),  # never none
        (48, 128, 6, 1, 6, 1, 4),  # MAX_JOBS decides
        (48, 128, 1, 1, 1, 1, 1),
        (16, 16, None, 3, 3, 3, 1),  # processors left over: threads for the architectures
    ],
)
def test_jobs_come_from_processors_and_memory(
    cpus: int, gib: int, setting: int | None, archs: int, count: int, threads: int, heavy: int
) -> None:
    jobs = build.jobs(cpus, gib * GIB, setting, archs)
    assert (jobs.count, jobs.nvcc_threads, jobs.heavy) == (count, threads, heavy)


@pytest.mark.parametrize("cpus", [1, 2, 4, 8, 16, 24, 32, 48, 96])
@pytest.mark.parametrize("gib", [10, 12, 16, 24, 32, 48, 64, 96, 128, 256])
def test_the_largest_units_that_can_meet_fit_into_the_memory(cpus: int, gib: int) -> None:
    """8.9, 7.4, 7.0 and 5.6 GiB: the four of the 12.0 build, as measured. 1.7 for any other: 1.0 was seen."""
    jobs = build.jobs(cpus, gib * GIB)
    assert sum((8.9, 7.4, 7.0, 5.6)[: jobs.heavy]) + 1.7 * (jobs.count - jobs.heavy) <= gib


def test_the_reason_for_the_jobs_names_what_limits_them() -> None:
    assert build.jobs(2, 24 * GIB).reason == "2 processors, 24 GiB available; limited by processors"
    assert build.jobs(16, 12 * GIB).reason.endswith("limited by memory: 2.4 GiB a unit, 9 GiB a large one")
    assert build.jobs(16, 8 * GIB, 5).reason == "MAX_JOBS=5"


def test_a_machine_that_is_too_small_for_the_largest_unit_is_told() -> None:
    assert build.too_little(10 * GIB) == ""
    assert "takes 9 GiB and 6 GiB are available" in build.too_little(6 * GIB)


def test_the_large_units_wait_for_each_other_and_no_others() -> None:
    unit = "build CMakeFiles/_C.dir/csrc/quantization/{}.o: CUDA /tree/{}\n  FLAGS = -O3"
    names = [
        "w8a8/cutlass/c3x/scaled_mm_sm120_fp8.cu",
        "w8a8/cutlass/moe/grouped_mm_c3x_sm90.cu",
        "fp4/nvfp4_scaled_mm_sm120_kernels.cu",
        "fp4/nvfp4_blockwise_moe_kernel.cu",
        "fp4/nvfp4_quant_kernels.cu",
        "w8a8/cutlass/scaled_mm_entry.cu",
        "w8a8/cutlass/moe/moe_data.cu",
        "marlin/sm80_kernel_float16_u4_float16.cu",
    ]
    text = build.with_pool("\n".join(unit.format(n, n) for n in names), 2)
    assert text.startswith("pool heavy\n  depth = 2\n")
    blocks = text.split("build ")[1:]
    assert [n for n, block in zip(names, blocks, strict=True) if "pool = heavy" in block] == names[:4]
    again = build.with_pool(text, 3)
    assert again == text.replace("depth = 2", "depth = 3")


def test_the_largest_units_are_started_first() -> None:
    unit = "build CMakeFiles/_C.dir/{}.o: CUDA /tree/{}\n  FLAGS = -O3\n"
    names = [
        "csrc/topk.cu",
        "csrc/torch_bindings.cpp",
        "csrc/marlin/sm80_kernel_float16_u4_float16.cu",
        "groups/rope.cu",
        "csrc/quantization/w8a8/cutlass/c3x/scaled_mm_sm120_fp8.cu",
        "groups/marlin_moe_float16_fp.cu",
    ]
    head, link = (
        "ninja_required_version = 1.5\n\n",
        "\n# Link\n\nbuild _C.so: LINK CMakeFiles/_C.dir/csrc/topk.cu.o\n",
    )
    text = head + "\n".join(unit.format(n, n) for n in names) + link
    ordered = build.largest_first(text)
    made = [name.removeprefix("CMakeFiles/_C.dir/") for name in build.objects(ordered)]
    assert made == [f"{names[at]}.o" for at in (4, 5, 2, 3, 0, 1)]
    assert ordered.startswith(head)
    assert ordered.endswith(link)
    assert sorted(ordered.split()) == sorted(text.split())
    assert build.largest_first(ordered) == ordered


def test_a_file_with_a_pool_is_put_in_order_and_read_again() -> None:
    unit = "build CMakeFiles/_C.dir/{}.o: CUDA /tree/{}\n  FLAGS = -O3\n"
    names = ["csrc/topk.cu", "csrc/quantization/w8a8/cutlass/c3x/scaled_mm_sm120_fp8.cu"]
    once = build.largest_first(build.with_pool("\n".join(unit.format(n, n) for n in names), 1))
    assert build.largest_first(build.with_pool(once, 2)) == once.replace("depth = 1", "depth = 2")
    assert once.count("pool = heavy") == 1


@pytest.mark.parametrize(("count", "grouped"), [(1, True), (2, True), (4, True), (5, False), (32, False)])
def test_small_sources_are_grouped_where_there_are_few_jobs(count: int, grouped: bool) -> None:
    assert build.grouped(build.Jobs(count, 1, ""), ("12.0",)) is grouped


@pytest.mark.parametrize("archs", [("9.0",), ("8.9",), ("9.0", "12.0")])
def test_they_are_not_grouped_for_architectures_for_which_nobody_tried_it(archs: tuple[str, ...]) -> None:
    assert not build.grouped(build.Jobs(2, 1, ""), archs)


def test_the_same_inputs_have_the_same_key_in_any_order() -> None:
    assert build.wheel_key(SOURCE) == build.wheel_key(dict(reversed(SOURCE.items())))


@pytest.mark.parametrize("part", sorted(SOURCE))
def test_each_input_decides_the_key(part: str) -> None:
    assert build.wheel_key({**SOURCE, part: SOURCE[part] + "x"}) != build.wheel_key(SOURCE)


def test_the_version_says_whose_build_it_is() -> None:
    assert build.version_of(("12.0",), "source") == "0.32.0+bwd.sm120"
    assert build.version_of(("9.0", "12.0"), "source") == "0.32.0+bwd.sm90.sm120"
    assert build.version_of(("12.0",), "wheel") == "0.32.0+bwd.wheel"


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (
            "[3/114] Building CUDA object CMakeFiles/_C_stable_libtorch.dir/csrc/topk.cu.o",
            NinjaStep(3, 114, "csrc/topk.cu"),
        ),
        (
            "[114/114] Linking CXX shared module _moe_C_stable_libtorch.abi3.so",
            NinjaStep(114, 114, "_moe_C_stable_libtorch.abi3.so"),
        ),
        ("ptxas info    : 0 bytes gmem", None),
        ("", None),
    ],
)
def test_a_line_of_ninja_is_read_as_a_step(line: str, step: NinjaStep | None) -> None:
    assert build.ninja_step(line) == step


def test_progress_says_how_far_how_fast_and_how_long() -> None:
    line = build.progress_line(NinjaStep(12, 114, "csrc/topk.cu"), 120.0)
    assert line == "built 12/114 (6.0 a minute, about 17 min left): csrc/topk.cu"


def test_the_time_left_counts_what_is_left_and_not_how_many() -> None:
    small, large = "csrc/cuda_view.cu", "csrc/quantization/w8a8/cutlass/c3x/scaled_mm_sm120_fp8.cu"
    missing = sum(map(build.weight, [small] * 8 + [large] * 2))
    line = build.progress_line(NinjaStep(8, 10, small), 240.0, 8 * build.weight(small), missing)
    assert line == f"built 8/10 (2.0 a minute, about 10 min left): {small}"
    assert "about 1 min left" in build.progress_line(NinjaStep(8, 10, small), 240.0)  # by their number


def test_a_build_whose_objects_are_all_there_is_told_by_its_steps() -> None:
    line = build.progress_line(NinjaStep(1, 2, "_C.so"), 60.0, 1.0, 0.0)
    assert line == "built 1/2 (1.0 a minute, about 1 min left): _C.so"


def test_the_weights_follow_the_measured_build() -> None:
    names = [
        "spinloop.abi3.so",
        "csrc/torch_bindings.cpp",
        "csrc/attention/merge_attn_states.cu",
        "csrc/quantization/marlin/sm80_kernel_float16_u4_float16.cu",
        "csrc/moe/marlin_moe_wna16/sm80_kernel_float16_u4_float16.cu",
        "csrc/moe/grouped_topk_kernels.cu",
        "csrc/quantization/fp4/nvfp4_scaled_mm_sm120_kernels.cu",
    ]
    assert sorted(names, key=build.weight) == names


@pytest.mark.parametrize(
    "unit", ["groups/marlin_moe_float16_int.cu", "groups/rope.cu", "csrc/topk.cu", "csrc/x.cpp"]
)
def test_a_unit_weighs_the_same_when_it_is_missing_and_when_it_is_done(unit: str) -> None:
    path = f"CMakeFiles/_C_stable_libtorch.dir/{unit}.o"
    step = build.ninja_step(f"[1/9] Building CUDA object {path}")
    assert step is not None
    assert build.weight(step.name) == build.weight(path.removesuffix(".o"))


def test_the_objects_are_read_out_of_ninjas_file() -> None:
    text = "build a/b.cu.o: CUDA b.cu\n  FLAGS = -O1\nbuild a.so: LINK a/b.cu.o\nbuild c.cpp.o: CXX c.cpp\n"
    assert build.objects(text) == ("a/b.cu.o", "c.cpp.o")


FAILURES = [
    (
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        -9,
        "OUT_OF_MEMORY",
        "set MAX_JOBS=2",
    ),
    ("g++: fatal error: Killed signal terminated program cc1plus", 1, "OUT_OF_MEMORY", "set MAX_JOBS=2"),
    ("virtual memory exhausted: Cannot allocate memory", 1, "OUT_OF_MEMORY", "set MAX_JOBS=2"),
    (
        "nvcc error   : 'ptxas' died due to signal 11 (Invalid memory reference)",
        139,
        "COMPILER_CRASHED",
        "again",
    ),
    ("csrc/topk.cu:12:1: internal compiler error: in foo, at bar.cc:1", 1, "COMPILER_CRASHED", "again"),
    ("/usr/bin/ld: final link failed: No space left on device", 1, "DISK_FULL", "free space"),
    (
        "csrc/a.cu:4:10: fatal error: cutlass/cutlass.h: No such file or directory",
        1,
        "MISSING_HEADER",
        "toolkit",
    ),
    ("/usr/bin/ld: cannot find -lcudart_static: No such file or directory", 1, "MISSING_LIBRARY", "toolkit"),
    (
        "#error -- unsupported GNU version! gcc versions later than 15 are not supported!",
        1,
        "COMPILER_TOO_NEW",
        "set CXX",
    ),
    ("nvcc fatal   : Unsupported gpu architecture 'compute_120f'", 1, "UNSUPPORTED_ARCH", "CUDA 13.0"),
    ("error: patch failed: CMakeLists.txt:12", 1, "PATCH_FAILED", "--clean"),
    ("  CMake 3.26.1 or higher is required.  You are running version 3.25.1", 1, "CMAKE_TOO_OLD", "newer"),
    ("cc1plus: fatal error: cannot open x.o: Read-only file system", 1, "READ_ONLY", "BWD_STATE_DIR"),
]


@pytest.mark.parametrize(
    ("line", "code", "name", "hint"), FAILURES, ids=[f"{f[2]}-{n}" for n, f in enumerate(FAILURES)]
)
def test_a_failure_is_named_with_its_place_and_a_remedy(line: str, code: int, name: str, hint: str) -> None:
    output = [
        "[5/9] Building x",
        "FAILED: [code=1] CMakeFiles/_C.dir/csrc/topk.cu.o ",
        line,
        "ninja: build stopped.",
    ]
    failure = build.diagnose(output, code, 4)
    assert failure.id == name
    assert failure.unit == "csrc/topk.cu"
    assert hint in failure.hint


def test_the_missing_thing_is_named() -> None:
    failure = build.diagnose(["a.cu:1:2: fatal error: cutlass/cutlass.h: No such file or directory"], 1, 4)
    assert failure.cause == "the header cutlass/cutlass.h is missing"


def test_the_first_cause_counts_and_not_what_follows_from_it() -> None:
    output = [
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "error: foo",
        "ninja: build stopped",
    ]
    assert build.diagnose(output, 1, 1).id == "OUT_OF_MEMORY"


def test_a_build_killed_without_a_word_most_likely_lacked_memory() -> None:
    assert build.diagnose([], -9, 8).hint.startswith("set MAX_JOBS=4")
    assert build.diagnose([], 137, 1).hint.startswith("set MAX_JOBS=1")


def test_an_unknown_failure_quotes_the_first_error_and_points_at_the_log() -> None:
    failure = build.diagnose(
        ["CMake Error at CMakeLists.txt:539 (message):", "  Machete generation failed."], 1, 2
    )
    assert failure.cause == "the build ended with code 1: CMake Error at CMakeLists.txt:539 (message):"
    assert failure.hint == "see the log"


def test_requirements_files_become_requires_dist() -> None:
    text = ["# Common", "-r common.txt", "", "torch==2.13.0", "numba == 0.65.0 # speculative decoding"]
    assert build.wheel_requirements(text) == ("torch==2.13.0", "numba == 0.65.0")
