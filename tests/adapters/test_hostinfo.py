"""The machine as read from /sys, /proc and NVML, on trees of tests/hosts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from bwd.adapters import hostinfo, nvml
from bwd.core.engine_choice import choose
from bwd.core.host import GIB, HostFacts
from bwd.core.nvml_facts import NvmlFacts
from bwd.core.topology import farthest, needed_nccl_level
from bwd.core.topology_text import render
from tests.hosts import tree


def read(root: Path, environ: dict[str, str] | None = None) -> HostFacts:
    """A tree on which nobody asked NVML."""
    return hostinfo.read(root, nvml=NvmlFacts(failed="not asked"), environ=environ or {})


@pytest.mark.parametrize("name", tree.names())
def test_every_tree_says_where_it_comes_from(name: str) -> None:
    first = (tree.FOLDER / f"{name}.host").read_text().splitlines()[0]
    assert first.startswith(("# captured: ", "# constructed from documentation: "))


@pytest.mark.parametrize("name", tree.names())
def test_every_machine_is_read_shown_and_written_as_data(name: str, tmp_path: Path) -> None:
    host = tree.facts(name, tmp_path)
    assert host.cpus_allowed
    assert {cpu for core in host.cores for cpu in core.cpus} >= host.cpus_allowed
    assert host.memory_total >= host.memory_available > 0
    assert host.shm_total > 0
    assert json.loads(json.dumps(host.to_dict()))["cpu_model"] == host.cpu_model
    assert host.cpu_model in render(host)


class TestThreadripper:
    @pytest.fixture
    def host(self, tmp_path: Path) -> HostFacts:
        return tree.facts("7960x-2x5090", tmp_path)

    def test_four_domains_of_six_cores_with_their_siblings(self, host: HostFacts) -> None:
        assert len(host.cores) == 24
        first = frozenset().union(*(core.cpus for core in host.cores if core.l3 == 0))
        assert first == {*range(6), *range(24, 30)}
        assert {core.l3 for core in host.cores} == {0, 1, 2, 3}
        assert host.nodes == (0,)

    def test_the_cards_with_their_place(self, host: HostFacts) -> None:
        assert [gpu.bdf for gpu in host.gpus] == ["0000:01:00.0", "0000:41:00.0"]
        assert [gpu.pci_path for gpu in host.gpus] == [("0000:00:01.1",), ("0000:40:01.1",)]
        assert all(gpu.numa_node is None for gpu in host.gpus)
        assert all(gpu.is_geforce and gpu.capability == (12, 0) for gpu in host.gpus)
        assert host.gpus[0].display is True
        assert host.gpus[0].processes[0].name == "Xorg"

    def test_the_driver_and_what_it_says_of_p2p(self, host: HostFacts) -> None:
        assert host.driver == (580, 95, 5)
        assert host.open_module is True
        assert host.cuda_driver == 13000
        assert host.p2p == {(0, 1): "CNS"}
        assert host.nvlink is False
        assert host.iommu == "identity"

    def test_different_root_ports_of_one_node_are_phb_which_amd_needs_no_level_for(
        self, host: HostFacts
    ) -> None:
        assert farthest(host.gpus) == "PHB"
        assert needed_nccl_level(host, host.gpus) is None

    def test_the_sound_function_of_a_card_is_not_a_lost_card(self, host: HostFacts) -> None:
        assert host.lost == ()

    def test_what_needs_root_is_named(self, host: HostFacts) -> None:
        assert host.unseen == ("ACS of the PCI bridges: the registers need root",)


def test_two_sockets(tmp_path: Path) -> None:
    host = tree.facts("dual-epyc-2xpro6000", tmp_path)
    assert host.packages == (0, 1)
    assert [gpu.numa_node for gpu in host.gpus] == [0, 1]
    assert farthest(host.gpus) == "SYS"
    assert host.gpus[1].local_cpus == {*range(32, 64), *range(96, 128)}
    assert host.iommu == "DMA-FQ"
    text = render(host)
    assert text.index("socket 0") < text.index("GPU 0: NVIDIA RTX PRO") < text.index("socket 1")


def test_two_h200_on_nvlink_in_a_virtual_machine(tmp_path: Path) -> None:
    host = tree.facts("h200x2-nvlink-vm", tmp_path, {"NCCL_NVLS_ENABLE": "0"})
    assert host.nvlink is True
    assert host.p2p == {(0, 1): "OK"}
    assert host.environ_multicast_off is True
    assert host.gpus[0].memory_bandwidth == 4_814_304_000_000
    assert host.gpus[0].memory_total == 150_109_880_320  # what torch says of the card as well
    assert host.shm_total == 268_435_456 * 1024  # two mounts on /dev/shm: the last is seen
    assert farthest(host.gpus) is None
    assert "GPU 0 - GPU 1: NVLink, OK" in render(host)


def test_a_laptop_says_less_and_nothing_is_guessed(tmp_path: Path) -> None:
    host = tree.facts("laptop-5070ti", tmp_path)
    gpu = host.gpus[0]
    assert gpu.power_cap_w is None
    assert gpu.processes[0].used is None
    assert gpu.link_width == 8
    assert len(host.cores) == 24
    assert choose("auto", host).engine == "cuda"


def test_a_machine_without_a_gpu_lacks_nothing(tmp_path: Path) -> None:
    host = tree.facts("no-gpu-vm", tmp_path)
    assert host.gpus == host.lost == host.unseen == ()
    assert host.driver is None
    assert choose("auto", host).why == "no NVIDIA GPU here"


def test_a_card_off_the_bus_is_named_once_and_the_other_serves(tmp_path: Path) -> None:
    host = tree.facts("7960x-fallen-off-the-bus", tmp_path)
    assert [gpu.index for gpu in host.gpus] == [0]
    assert [lost.bdf for lost in host.lost] == ["0000:41:00.0"]
    assert "fallen off the bus" in host.lost[0].why
    assert choose("auto", host).engine == "cuda"


def test_a_card_bound_to_nouveau_is_named_by_its_driver(tmp_path: Path) -> None:
    host = tree.facts("nouveau-no-nvml", tmp_path)
    assert host.lost[0].why == "the kernel driver nouveau is bound to it, not nvidia"
    assert host.unseen == ("NVML: no NVML library (libnvidia-ml.so.1)",)
    choice = choose("auto", host)
    assert choice.engine == "cpu"
    assert "nouveau" in choice.why


def test_a_driver_updated_without_a_reboot_is_named(tmp_path: Path) -> None:
    host = tree.facts("driver-mismatch", tmp_path)
    assert host.driver == (580, 82, 7)
    assert "reboot" in choose("auto", host).why


def test_a_driver_that_stops_answering_keeps_what_it_said_before(tmp_path: Path) -> None:
    host = tree.facts("nvml-hangs", tmp_path)
    assert [gpu.index for gpu in host.gpus] == [0]
    assert host.lost[0].bdf == "0000:41:00.0"
    assert "no answer within 10 s" in host.lost[0].why
    assert any(note.endswith("at: GPU 1") for note in host.unseen)


class TestTree:
    """What a fixture of a whole machine does not have."""

    def write(self, root: Path, name: str, text: str) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def base(self, root: Path) -> None:
        self.write(root, "proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
        self.write(root, "proc/self/status", "Cpus_allowed_list:\t0-3\n")
        self.write(root, "sys/devices/system/cpu/online", "0-1\n")

    def test_only_cpus_that_run_count(self, tmp_path: Path) -> None:
        self.base(tmp_path)
        assert read(tmp_path).cpus_allowed == {0, 1}

    @pytest.mark.parametrize(
        ("cgroup", "files"),
        [
            (
                "0::/user/box\n",
                {
                    "sys/fs/cgroup/user/box/memory.max": "max\n",
                    "sys/fs/cgroup/user/memory.max": "512000000\n",
                    "sys/fs/cgroup/user/memory.current": "300000000\n",
                    "sys/fs/cgroup/user/memory.stat": "anon 1\ninactive_file 100000000\n",
                },
            ),
            (
                "4:cpu,memory:/box\n",
                {
                    "sys/fs/cgroup/memory/memory.limit_in_bytes": "512000000\n",
                    "sys/fs/cgroup/memory/memory.usage_in_bytes": "300000000\n",
                    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100000000\n",
                },
            ),
        ],
    )
    def test_the_limit_of_a_container_counts(
        self, tmp_path: Path, cgroup: str, files: dict[str, str]
    ) -> None:
        self.base(tmp_path)
        self.write(tmp_path, "proc/self/cgroup", cgroup)
        for name, text in files.items():
            self.write(tmp_path, name, text)
        host = read(tmp_path)
        assert host.memory_total == 512_000_000
        assert host.memory_available == 312_000_000

    def test_a_cgroup_without_a_limit_is_the_whole_machine(self, tmp_path: Path) -> None:
        self.base(tmp_path)
        self.write(tmp_path, "proc/self/cgroup", "4:memory:/\n")
        self.write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
        assert read(tmp_path).memory_total == 1_000_000 * 1024

    def test_what_is_not_there_is_named(self, tmp_path: Path) -> None:
        self.base(tmp_path)
        (tmp_path / "proc/meminfo").unlink()
        unseen = read(tmp_path).unseen
        assert any(note.startswith("memory: /proc/meminfo: ") for note in unseen)
        assert any(note.startswith("/dev/shm: ") for note in unseen)

    def test_the_shell_variables_that_matter(self, tmp_path: Path) -> None:
        self.base(tmp_path)
        host = read(tmp_path, {"NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": ""})
        assert host.environ_multicast_off
        assert host.visible_devices == ""
        assert not read(tmp_path, {"NCCL_NVLS_ENABLE": "1"}).environ_multicast_off


@pytest.mark.parametrize(("control", "redirects"), [(0x0000, False), (0x001D, True), (0x0001, False)])
def test_acs_of_a_bridge_is_read_where_root_may(control: int, redirects: bool, tmp_path: Path) -> None:
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")  # AER, next at 0x148
    config[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")  # ACS, the last
    config[0x14E:0x150] = control.to_bytes(2, "little")
    assert hostinfo.acs_control(bytes(config)) == control
    root = tmp_path / "m"
    said = tree.build("7960x-2x5090", root)
    for port in ("0000:00:01.1", "0000:40:01.1"):
        home = root / "sys/devices" / f"pci{port[:7]}" / port
        (home / "config").write_bytes(config)
        (root / "sys/bus/pci/devices" / port).symlink_to(home)
    host = hostinfo.read(root, nvml=said, environ={})
    assert host.acs == ("redirects at 0000:00:01.1, 0000:40:01.1" if redirects else "off")


def test_a_configuration_space_without_acs_or_with_a_loop() -> None:
    assert hostinfo.acs_control(b"") is None
    assert hostinfo.acs_control(bytes(4096)) is None
    loop = bytearray(4096)
    loop[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert hostinfo.acs_control(bytes(loop)) is None


class TestChild:
    """The child that asks NVML, played by small programs."""

    def program(self, text: str) -> tuple[str, ...]:
        return (sys.executable, "-c", text)

    def test_this_machine_answers_or_says_why_not(self) -> None:
        facts = nvml.read()
        assert facts.gpus or facts.failed

    def test_a_hung_driver_costs_its_time_limit_and_no_more(self) -> None:
        play = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            'print(\'{"fact": "driver", "version": "580.95.05", "cuda": 13000}\');'
            'print(\'{"fact": "step", "name": "GPU 1"}\', flush=True); time.sleep(600)'
        )
        started = time.monotonic()
        facts = nvml.read(1.0, self.program(play))
        assert time.monotonic() - started < 5
        assert facts.failed == "no answer within 1 s (a hung driver hangs nvidia-smi too), at: GPU 1"
        assert facts.driver == (580, 95, 5)

    def test_a_crash_of_the_library_is_named_by_its_signal(self) -> None:
        facts = nvml.read(5.0, self.program("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
        assert facts.failed == "the process that asks it was ended by signal 11, at: starting"

    def test_an_early_end_is_no_answer(self) -> None:
        facts = nvml.read(5.0, self.program("raise SystemExit(3)"))
        assert facts.failed == "ended early, at: starting"

    def test_a_program_that_is_not_there(self) -> None:
        assert "does not start" in nvml.read(5.0, ("/nonexistent/python",)).failed

    def test_noise_on_its_output_is_skipped(self) -> None:
        play = 'print("WARNING: hello"); print("[1]"); print(\'{"fact": "end"}\')'
        assert nvml.read(5.0, self.program(play)) == NvmlFacts()


def test_nothing_was_asked_is_said_as_such(tmp_path: Path) -> None:
    host = tree.build("9950x-1x5090", tmp_path)
    assert host.gpus
    unasked = read(tmp_path)
    assert unasked.lost[0].why == "NVML: not asked"
    assert unasked.memory_total == 64 * GIB


def test_intels_matrix_unit_is_seen(tmp_path: Path) -> None:
    """vLLM's CPU engine takes another kernel where it is: the plan has to know."""
    cpuinfo = tmp_path / "proc" / "cpuinfo"
    cpuinfo.parent.mkdir()
    for flags, seen in (("fpu avx512_bf16 amx_bf16 amx_tile", True), ("fpu avx512_bf16", False)):
        cpuinfo.write_text(f"processor : 0\nmodel name : X\nflags : {flags}\n")
        assert hostinfo.read(tmp_path, nvml=NvmlFacts(), environ={}).cpu_amx is seen


def test_the_picture_says_which_threads_share_a_core(tmp_path: Path) -> None:
    shown = render(tree.facts("7960x-2x5090", tmp_path))
    assert "L3 0: CPUs 0-5,24-29  6 cores x 2 threads (n with n+24)" in shown
