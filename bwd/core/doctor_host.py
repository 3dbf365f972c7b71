"""What `bwd doctor` concludes of memory, disk, CPUs, port, compilers and the kernel's log. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from bwd.core import checks
from bwd.core.affinity import cpus_wanted
from bwd.core.checks import Verdict
from bwd.core.events import Cause
from bwd.core.host import GIB, HostFacts, format_cpus
from bwd.core.signatures_kernel import KERNEL

_SHM_COMFORT = GIB
"""Bytes of /dev/shm for two ranks and more: NCCL without P2P puts its channels there, tens of MiB each."""
_MEMORY_COMFORT = 4 * GIB
"""Bytes that an engine's processes take on the host while they load (two ranks: about 3 GiB)."""

_LOST = ("XID_LOST", "XID_MEMORY", "CARD_LOST")
"""Rows of the kernel's log after which a card is not to be trusted before a reboot."""


def of_cause(cause: Cause) -> Verdict:
    """A refusal of the preflight as a row."""
    return checks.failed(cause.text, cause.hint)


def shm(cause: Cause | None, free: int | None, ranks: int) -> Verdict:
    """/dev/shm: `cause` is the preflight's, `free` bytes."""
    if cause is not None:
        return of_cause(cause)
    if free is None:
        return checks.could_not("how much of /dev/shm is free cannot be read")
    text = f"{free / GIB:.1f} GiB free"
    if ranks > 1 and free < _SHM_COMFORT:
        return checks.warning(
            f"{text}, little for {ranks} ranks", "in a container: --ipc=host or --shm-size=8g"
        )
    return checks.ok(text)


def memory(host: HostFacts, cause: Cause | None) -> Verdict:
    """The host's memory: `cause` is the preflight's (the weights do not fit)."""
    if cause is not None:
        return of_cause(cause)
    if not host.memory_total:
        return checks.could_not("/proc/meminfo does not say")
    text = f"{host.memory_available / GIB:.1f} of {host.memory_total / GIB:.1f} GiB available"
    if host.memory_available < _MEMORY_COMFORT:
        return checks.warning(f"{text}: little for loading", "end something big, or add swap")
    return checks.ok(text)


def disk(cause: Cause | None, free: int | None, needs: int, notes: Sequence[str]) -> Verdict:
    """The disk of the state folder: bytes free, and what the next start still needs as far as is known."""
    if cause is not None:
        return of_cause(cause)
    if free is None:
        return checks.could_not("how much is free cannot be read")
    text = f"{free / 1e9:.1f} GB free"
    if needs > free:
        return checks.failed(
            f"{text}, {needs / 1e9:.1f} GB are needed ({'; '.join(notes)})",
            "free some space, or set BWD_STATE_DIR to another disk",
        )
    return checks.ok(text + (f"; still to come: {'; '.join(notes)}" if notes else ""))


def cpus(host: HostFacts, ranks: int) -> Verdict:
    """How many CPUs this process may use, and why not all. `ranks` on cards; 0: the CPU engine, which takes
    what there is."""
    online = frozenset().union(*(core.cpus for core in host.cores)) if host.cores else host.cpus_allowed
    text = f"{len(host.cpus_allowed)} of {len(online)} ({format_cpus(host.cpus_allowed)})"
    held = " by a cpuset or taskset" if host.cpus_allowed < online else ""
    if ranks and len(host.cpus_allowed) < cpus_wanted(ranks):
        return checks.warning(
            f"{text}{held}; an engine of {ranks} rank{'s' if ranks > 1 else ''} wants {cpus_wanted(ranks)}",
            "widen the cpuset" if held else "nothing else should run here",
        )
    return checks.ok(text + held)


def port(cause: Cause | None, where: str) -> Verdict:
    return of_cause(cause) if cause is not None else checks.ok(f"{where} is free or ours")


def compilers(tools: Mapping[str, str]) -> Verdict:
    """The tools that compile kernels while the engine starts: name to path, "" for one that is missing."""
    missing = [name for name, path in tools.items() if not path]
    if missing:
        return checks.failed(
            f"missing: {', '.join(missing)}; FlashInfer and Triton compile kernels at the first start",
            "the locked cuda environment has them; ENGINE_PYTHON needs a CUDA 13 toolkit, ninja and g++",
        )
    return checks.ok(", ".join(tools.values()))


_MULTICAST_OFF = frozenset({
    "NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "NVSHMEM_DISABLE_NVLS=1",
})  # fmt: skip


def nccl_files(files: Mapping[str, str], plan: Mapping[str, str] | None = None) -> Verdict:
    """Files that set variables behind everybody's back: path to text. `plan` is the environment of the
    engine, which comes first: NCCL sets what is not set yet (setenv without overwriting, src/misc/param.cc),
    whatever its name, and only once it is in use."""
    plan = plan or {}
    said = {path: [line.strip() for line in text.splitlines() if _sets(line)] for path, text in files.items()}
    # a line without a name stands for a file that cannot be read, and that nobody can tell harmless
    names = {line: line.partition("=")[0] for lines in said.values() for line in lines}
    counts = {
        path: found for path, lines in said.items() if (found := [x for x in lines if names[x] not in plan])
    }
    if counts:
        keep = all(line in _MULTICAST_OFF for lines in counts.values() for line in lines)
        return checks.warning(
            "; ".join(f"{path} sets {', '.join(lines[:4])}" for path, lines in counts.items()),
            "somebody keeps NVLink multicast off here; NVLINK_MULTICAST=off says so to more than NCCL"
            if keep
            else "they count wherever the plan does not say otherwise: remove what nobody needs",
        )
    if not names:
        return checks.ok("none" if not files else f"{', '.join(files)}: nothing in it")
    same = all(plan[name] == line.partition("=")[2] for line, name in names.items())
    what = "says the same" if same else "comes first"
    return checks.ok(f"{', '.join(path for path in said if said[path])}: the plan sets all of it and {what}")


def _sets(line: str) -> bool:
    return "=" in line and not line.lstrip().startswith("#")


def xid(lines: Sequence[str] | None, why: str) -> Verdict:
    """Faults of cards, IOMMU and PCIe in the kernel's log of this boot; None: it cannot be read, `why`."""
    if lines is None:
        return checks.could_not(why, "`sudo dmesg | grep -e NVRM -e Xid` shows it")
    bad: Counter[str] = Counter()
    hint = ""
    lost = False
    for line in lines:
        for row in KERNEL:
            if row.literal not in line and not any(word in line for word in row.also):
                continue
            match = row.regex.search(line)
            if match is None:
                continue
            named = {name: value or "" for name, value in match.groupdict().items()}
            bad[row.means.format_map(named)] += 1
            if row.id in _LOST:
                lost, hint = True, row.hint.format_map(named) or hint
            hint = hint or row.hint.format_map(named)
            break
    if not bad:
        return checks.ok("none since the boot")
    text = "; ".join(f"{means} ({count}x)" if count > 1 else means for means, count in bad.most_common(4))
    return checks.failed(text, hint) if lost else checks.warning(text, hint)
