"""Facts of a machine as values."""

from __future__ import annotations

import pytest

from bwd.core.engine_choice import choose, model_id
from bwd.core.host import format_cpus, parse_version
from bwd.core.nvml_facts import bdf_of
from tests.core.plan_support import card, machine, no_gpu


@pytest.mark.parametrize(
    ("cpus", "text"),
    [(set(), ""), ({3}, "3"), ({0, 1}, "0,1"), ({0, 1, 2, 5}, "0-2,5"), ({1, 2, 3, 25, 26, 27}, "1-3,25-27")],
)
def test_cpus_as_taskset_writes_them(cpus: set[int], text: str) -> None:
    assert format_cpus(cpus) == text


@pytest.mark.parametrize(
    ("text", "version"),
    [("580.95.05", (580, 95, 5)), ("595.84", (595, 84)), ("580.95-beta", (580,)), ("", None), ("x", None)],
)
def test_driver_versions(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def test_nvml_writes_a_wider_domain_than_sysfs() -> None:
    assert bdf_of("00000000:C1:00.0") == "0000:c1:00.0"
    assert bdf_of("") == ""


def test_the_key_changes_with_driver_kernel_command_line_and_cards() -> None:
    host = machine(card(0), card(1))
    others = [
        machine(card(0), card(1), driver_text="590.1"),
        machine(card(0), card(1), kernel="7.0"),
        machine(card(0), card(1), cmdline="iommu=pt"),
        machine(card(0)),
        machine(card(0), card(1, uuid="GPU-other")),
    ]
    assert len({host.key, *(other.key for other in others)}) == 6
    assert host.key == machine(card(0, memory_free=1), card(1)).key


class TestEngineAuto:
    def test_a_card_and_a_driver_that_are_new_enough(self) -> None:
        choice = choose("auto", machine(card(0), card(1)))
        assert (choice.engine, choice.why) == ("cuda", "2x NVIDIA GeForce RTX 5090 with driver 580.95.05")

    def test_no_card(self) -> None:
        assert choose("auto", no_gpu()).engine == "cpu"

    def test_an_old_driver_says_which_would_do(self) -> None:
        choice = choose("auto", machine(card(0), driver=(570, 133), driver_text="570.133.07"))
        assert choice.engine == "cpu"
        assert choice.why == "driver 570.133.07 is too old for CUDA 13.0"
        assert "R580" in choice.fixable

    def test_an_unreadable_driver_version(self) -> None:
        assert choose("auto", machine(card(0), driver=None, driver_text="")).engine == "cpu"

    def test_an_old_card(self) -> None:
        choice = choose("auto", machine(card(0, name="Tesla V100", capability=(7, 0))))
        assert choice.engine == "cpu"
        assert "7.0" in choice.why

    def test_one_good_card_beside_an_old_one(self) -> None:
        host = machine(card(0, name="GeForce GTX 1080", capability=(6, 1)), card(1))
        assert choose("auto", host).engine == "cuda"

    @pytest.mark.parametrize("engine", ["cuda", "cpu"])
    def test_a_set_engine_is_taken(self, engine: str) -> None:
        assert choose(engine, no_gpu()).engine == engine

    def test_a_note_on_nvml_is_passed_on(self) -> None:
        host = no_gpu(unseen=("NVML: no answer within 10 s, at: nvmlInit",))
        assert choose("auto", host).why == "no GPU seen (NVML: no answer within 10 s, at: nvmlInit)"


def test_the_default_model_depends_on_the_engine() -> None:
    assert model_id("auto", "cuda") == "casperhansen/deepseek-r1-distill-qwen-32b-awq"
    assert model_id("auto", "cpu") == "demo"
    assert model_id("org/name", "cpu") == "org/name"
