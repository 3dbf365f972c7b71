"""What `bwd doctor` concludes from facts about the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bwd.core import doctor_gpu, doctor_host
from bwd.core.checks import Outcome, Verdict
from bwd.core.events import Cause, Kind
from bwd.core.host import GIB, Gpu, GpuProcess, HostFacts, LostGpu
from bwd.core.plan_values import P2pVerdict
from bwd.core.signatures_kernel import KERNEL
from tests.core.plan_support import card, machine, no_gpu
from tests.hosts import tree

NVIDIA = frozenset({"nvidia", "nvidia_uvm"})


def well(index: int, **changes: object) -> Gpu:
    """A card about which there is nothing to say."""
    made = card(
        index, link_gen=5, link_gen_max=5, link_width=16, link_width_max=16, bar1_total=32 * GIB,
        power_cap_w=575.0, power_default_w=575.0, persistence=True, kernel_driver="nvidia", utilization=0,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def two(**changes: object) -> HostFacts:
    return replace(machine(well(0), well(1)), open_module=True, **changes)  # type: ignore[arg-type]


def about_cards(host: HostFacts) -> dict[str, Verdict]:
    return {
        "cards": doctor_gpu.cards(host),
        "driver": doctor_gpu.driver(host, own=False),
        "bound": doctor_gpu.bound(host, NVIDIA),
        "persistence": doctor_gpu.persistence(host),
        "power": doctor_gpu.power(host),
        "link": doctor_gpu.link(host),
        "bar1": doctor_gpu.bar1(host),
        "p2p": doctor_gpu.p2p(host, None),
        "owners": doctor_gpu.owners(host, frozenset()),
    }


def fails(verdict: Verdict, *words: str) -> None:
    assert verdict.outcome == Outcome.FAILED, verdict
    assert verdict.hint
    assert all(word in verdict.evidence for word in words), verdict


def warns(verdict: Verdict, *words: str) -> None:
    assert verdict.outcome == Outcome.WARNING, verdict
    assert verdict.hint
    assert all(word in verdict.evidence for word in words), verdict


def test_on_a_good_machine_nothing_is_wrong() -> None:
    outcomes = {name: verdict.outcome for name, verdict in about_cards(two()).items()}
    assert set(outcomes.values()) == {Outcome.OK, Outcome.NOT_APPLICABLE}
    assert outcomes.pop("p2p") == Outcome.NOT_APPLICABLE  # a stock driver: CNS
    assert set(outcomes.values()) == {Outcome.OK}


def test_without_a_card_nothing_about_cards_is_judged() -> None:
    assert {verdict.outcome for verdict in about_cards(no_gpu()).values()} == {Outcome.NOT_APPLICABLE}


@pytest.mark.parametrize("name", tree.names())
def test_every_machine_gets_an_answer_in_every_row(name: str, tmp_path: Path) -> None:
    for row, verdict in about_cards(tree.facts(name, tmp_path)).items():
        assert verdict.evidence, row
        if verdict.outcome in (Outcome.FAILED, Outcome.WARNING):
            assert verdict.hint, row


class TestCardsAndDriver:
    def test_a_card_off_the_bus_and_one_that_nouveau_holds(self, tmp_path: Path) -> None:
        fallen = tree.facts("7960x-fallen-off-the-bus", tmp_path / "a")
        fails(doctor_gpu.cards(fallen), "fallen off the bus", "others are usable")
        held = tree.facts("nouveau-no-nvml", tmp_path / "b")
        fails(doctor_gpu.cards(held), "nouveau")
        fails(doctor_gpu.bound(held, frozenset({"nouveau"})), "nouveau")

    def test_a_driver_that_hangs_is_not_a_machine_without_cards(self, tmp_path: Path) -> None:
        found = doctor_gpu.cards(tree.facts("nvml-hangs", tmp_path))
        assert found.outcome in (Outcome.COULD_NOT, Outcome.FAILED)
        assert "no answer within" in found.evidence

    def test_a_library_of_another_driver_than_the_loaded_one(self, tmp_path: Path) -> None:
        fails(doctor_gpu.cards(tree.facts("driver-mismatch", tmp_path)), "reboot")

    def test_driver_and_runtime(self) -> None:
        old = two(driver=(570, 86, 10), driver_text="570.86.10", cuda_driver=12080)
        fails(doctor_gpu.driver(old, own=False), "570.86.10", "13.0")
        warns(doctor_gpu.driver(old, own=True), "570.86.10")
        fails(doctor_gpu.driver(two(cuda_driver=12090), own=False), "CUDA 12.9")
        fails(doctor_gpu.driver(replace(two(), open_module=False), own=False), "closed kernel module")
        lost = no_gpu(lost=(LostGpu("0000:01:00.0", "no kernel driver is bound to it"),))
        fails(doctor_gpu.driver(lost, own=False), "no NVIDIA driver")

    def test_unlike_mig_and_old_cards(self) -> None:
        warns(doctor_gpu.cards(machine(well(0), well(1, name="NVIDIA GeForce RTX 4090", capability=(8, 9)))),
              "unlike")  # fmt: skip
        fails(doctor_gpu.cards(machine(well(0, mig=True))), "MIG")
        warns(doctor_gpu.cards(machine(well(0), well(1, name="Quadro P400", capability=(6, 1)))), "too old")

    @pytest.mark.parametrize("module", ["nouveau", "nova_core"])
    def test_a_foreign_module_beside_nvidia(self, module: str) -> None:
        warns(doctor_gpu.bound(two(), NVIDIA | {module}), module)
        fails(doctor_gpu.bound(machine(well(0, kernel_driver=module)), NVIDIA), module)

    def test_what_cannot_be_seen_is_said(self) -> None:
        assert doctor_gpu.bound(two(), None).outcome == Outcome.COULD_NOT
        blind = machine(well(0, link_width=None, power_cap_w=None, persistence=None, kernel_driver=None))
        for row in ("bound", "link", "power", "persistence"):
            assert about_cards(blind)[row].outcome == Outcome.COULD_NOT, row


class TestLinkAndPower:
    def test_an_idle_link_that_slowed_down_is_right(self) -> None:
        idle = machine(well(0, link_gen=1))
        assert doctor_gpu.link(idle).outcome == Outcome.OK
        assert "idle" in doctor_gpu.link(idle).evidence

    def test_a_busy_one_is_not_and_missing_lanes_never_are(self) -> None:
        warns(doctor_gpu.link(machine(well(0, link_gen=3, utilization=98))), "gen 3 of 5")
        warns(doctor_gpu.link(machine(well(0), well(1, link_width=4))), "GPU 1", "x4 of x16")

    def test_a_power_cap(self) -> None:
        warns(doctor_gpu.power(machine(well(0), well(1, power_cap_w=400.0))), "GPU 1 at 400 of 575 W")

    def test_persistence_and_small_bar1(self) -> None:
        warns(doctor_gpu.persistence(machine(well(0, persistence=False))), "GPU 0")
        warns(doctor_gpu.bar1(machine(well(0), well(1, bar1_total=GIB // 4))), "GPU 1: 0.25 GiB")
        nvlink = two(nvlink=True)
        assert doctor_gpu.bar1(nvlink).outcome == Outcome.NOT_APPLICABLE


class TestP2p:
    ok = two(p2p={(0, 1): "OK"}, boot_id="b", iommu="DMA-FQ")

    def test_untested_it_is_off_and_the_iommu_is_named(self) -> None:
        warns(doctor_gpu.p2p(self.ok, None), "untested", "DMA-FQ")
        assert "bwd doctor p2p" in doctor_gpu.p2p(self.ok, None).hint

    def test_a_verdict_of_this_boot_counts_and_no_other(self) -> None:
        key = self.ok.boot_key
        assert doctor_gpu.p2p(self.ok, P2pVerdict(True, key, "4 steps")).outcome == Outcome.OK
        warns(doctor_gpu.p2p(self.ok, P2pVerdict(False, key, "hang")), "vetoed", "hang")
        warns(doctor_gpu.p2p(self.ok, P2pVerdict(True, "another", "4 steps")), "before this boot")

    def test_nvlink_is_used_untested_and_says_so(self) -> None:
        found = doctor_gpu.p2p(replace(self.ok, nvlink=True), None)
        assert found.outcome == Outcome.OK
        assert "untested" in found.evidence


class TestOwners:
    def test_somebody_else_is_named_and_the_engine_is_not(self) -> None:
        mine, other = GpuProcess(5, "python", 20 * GIB), GpuProcess(6, "blender", 4 * GIB)
        host = machine(well(0, processes=(mine, other)))
        warns(doctor_gpu.owners(host, frozenset({5})), "blender (pid 6), 4.0 GiB")
        assert "python" not in doctor_gpu.owners(host, frozenset({5})).evidence

    def test_a_desktop_is_told_but_no_warning(self) -> None:
        found = doctor_gpu.owners(machine(well(0, processes=(GpuProcess(7, "Xorg", GIB // 3),))), frozenset())
        assert found.outcome == Outcome.OK
        assert "Xorg" in found.evidence

    def test_memory_that_nobody_is_named_for(self) -> None:
        warns(doctor_gpu.owners(machine(well(0, memory_free=10 * GIB)), frozenset()), "nobody NVML names")


class TestCode:
    def test_code_for_the_cards(self) -> None:
        good = {"_C.abi3.so": {"sm_120": 80, "ptx compute_120": 1}, "_moe_C.abi3.so": {"sm_120": 26}}
        assert doctor_gpu.code(good, [well(0)]).outcome == Outcome.OK
        # binary code runs on a later minor of its major (CUDA's compatibility rule)
        assert doctor_gpu.code(good, [well(0, capability=(12, 1))]).outcome == Outcome.OK

    def test_none_for_them_and_only_text_to_compile(self) -> None:
        fails(doctor_gpu.code({"_C.abi3.so": {"sm_90": 80}}, [well(0)]), "_C.abi3.so has no sm_120 (sm_90)")
        warns(doctor_gpu.code({"_C.abi3.so": {"sm_80": 9, "ptx compute_80": 9}}, [well(0)]), "sm_120")
        fails(doctor_gpu.code({}, [well(0)]), "no device code")

    def test_a_library_for_other_cards_alone_is_no_fault(self) -> None:
        found = {"_C.abi3.so": {"sm_120": 1}, "_flashmla_C.abi3.so": {"sm_90": 4}}
        assert doctor_gpu.code(found, [well(0)]).outcome == Outcome.OK


class TestHost:
    def test_a_refusal_of_the_preflight_is_a_failure_with_its_hint(self) -> None:
        cause = Cause(
            Kind.HELD, "PORT_HELD", "port 8000 is held by nginx (pid 7)", where="PORT", hint="stop it"
        )
        assert doctor_host.port(cause, "") == Verdict(Outcome.FAILED, cause.text, "stop it")
        for row in (
            doctor_host.shm(cause, 1, 2),
            doctor_host.memory(no_gpu(), cause),
            doctor_host.disk(cause, 1, 0, ()),
        ):
            assert row.outcome == Outcome.FAILED

    def test_little_is_a_warning_and_too_little_a_failure(self) -> None:
        warns(doctor_host.shm(None, 128 << 20, 2), "little for 2 ranks")
        assert doctor_host.shm(None, 128 << 20, 1).outcome == Outcome.OK
        warns(doctor_host.memory(no_gpu(memory_available=2 * GIB), None), "2.0 of 24.0 GiB")
        fails(
            doctor_host.disk(None, 10**9, 2 * 10**9, ("the cpu environment is installed (once)",)),
            "1.0 GB",
            "2.0",
        )

    def test_a_cpuset_is_named(self) -> None:
        held = two(cpus_allowed=frozenset({0, 1, 2}))
        warns(doctor_host.cpus(held, 2), "3 of 48 (0-2) by a cpuset", "2 ranks wants 8")
        assert doctor_host.cpus(two(), 2).outcome == Outcome.OK
        assert doctor_host.cpus(no_gpu(), 0).outcome == Outcome.OK

    def test_missing_compilers(self) -> None:
        fails(doctor_host.compilers({"nvcc": "", "ninja": "", "a C++ compiler": "/bin/g++"}), "nvcc, ninja")
        assert doctor_host.compilers({"nvcc": "/x/nvcc"}).outcome == Outcome.OK

    def test_files_that_set_nccls_variables(self) -> None:
        files = {"/etc/nccl.conf": "# old\nNCCL_P2P_LEVEL=SYS\n", "/home/a/.nccl.conf": "# nothing\n"}
        warns(doctor_host.nccl_files(files), "/etc/nccl.conf sets NCCL_P2P_LEVEL=SYS")
        assert doctor_host.nccl_files({"/etc/nccl.conf": "# nothing\n"}).outcome == Outcome.OK
        assert doctor_host.nccl_files({}).outcome == Outcome.OK

    def test_files_whose_lines_the_plan_sets_itself_change_nothing(self) -> None:
        files = {"/etc/nccl.conf": "NCCL_NVLS_ENABLE=0\nNVSHMEM_DISABLE_NVLS=1\n"}
        off = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
        found = doctor_host.nccl_files(files, off)
        assert (found.outcome, found.hint) == (Outcome.OK, "")
        assert found.evidence == "/etc/nccl.conf: the plan sets all of it and says the same"
        found = doctor_host.nccl_files(files, {**off, "NCCL_NVLS_ENABLE": "1"})
        assert found.evidence.endswith("comes first")

    def test_nobody_is_told_to_remove_what_keeps_multicast_off(self) -> None:
        found = doctor_host.nccl_files({"/etc/nccl.conf": "NCCL_NVLS_ENABLE=0\n"}, {"NCCL_DEBUG": "INFO"})
        warns(found, "/etc/nccl.conf sets NCCL_NVLS_ENABLE=0")
        assert "NVLINK_MULTICAST=off" in found.hint
        assert "remove" not in found.hint

    def test_a_file_that_cannot_be_read_is_not_called_harmless(self) -> None:
        found = doctor_host.nccl_files({"/etc/nccl.conf": "=Permission denied"}, {"NCCL_DEBUG": "INFO"})
        warns(found, "/etc/nccl.conf sets =Permission denied")


class TestKernelLog:
    @pytest.mark.parametrize("row", KERNEL, ids=lambda row: row.id)
    def test_every_known_line_is_found_in_the_history(self, row: object) -> None:
        found = doctor_host.xid(["usb 1-1: new device", row.fixture], "")  # type: ignore[attr-defined]
        assert found.outcome in (Outcome.WARNING, Outcome.FAILED)

    def test_a_lost_card_is_a_failure_a_fault_of_a_program_a_warning(self) -> None:
        fixture = {row.id: row.fixture for row in KERNEL}
        fails(doctor_host.xid([fixture["XID_APP"], fixture["XID_LOST"]], ""), "until a reboot (Xid 79)")
        found = doctor_host.xid([fixture["XID_APP"]] * 3, "")
        assert found.outcome == Outcome.WARNING
        assert "(3x)" in found.evidence

    def test_a_log_that_is_closed_to_us_says_how_to_see_it(self) -> None:
        found = doctor_host.xid(None, "/dev/kmsg: Operation not permitted")
        assert found.outcome == Outcome.COULD_NOT
        assert "sudo dmesg" in found.hint
        assert doctor_host.xid([], "").outcome == Outcome.OK
