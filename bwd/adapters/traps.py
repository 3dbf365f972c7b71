"""Reads what a machine keeps in odd places and a start trips over: NCCL's configuration files, loaded
kernel modules, compilers, device code in libraries."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path


def nccl_files(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """The files that NCCL 2.29.7 reads variables from (src/misc/param.cc) and that exist, with their text:
    NCCL_CONF_FILE or else ~/.nccl.conf, then /etc/nccl.conf."""
    own = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf"
    found: dict[str, str] = {}
    for path in (Path(own), root / "etc" / "nccl.conf"):
        try:
            found[os.fspath(path)] = path.read_text("utf-8", "replace")
        except FileNotFoundError:
            continue
        except OSError as error:
            found[os.fspath(path)] = f"={error.strerror}"  # it is there, and counts for whoever may read it
    return found


def kernel_modules(folder: Path = Path("/sys/module")) -> frozenset[str] | None:
    """Names of the kernel's modules, loaded or built in; None when they cannot be read."""
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return None


def compilers(environ: Mapping[str, str]) -> dict[str, str]:
    """nvcc, ninja and a C++ compiler as an engine with this environment finds them: name to path, "" for
    a missing one."""
    path = environ.get("PATH", os.defpath)
    home = environ.get("CUDA_HOME", "")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else None
    wanted = environ.get("CXX") or "c++"
    return {
        "nvcc": nvcc
        or shutil.which("nvcc", path=path)
        or shutil.which("nvcc", path="/usr/local/cuda/bin")
        or "",
        "ninja": shutil.which("ninja", path=path) or "",
        "a C++ compiler": shutil.which(wanted, path=path) or shutil.which("g++", path=path) or "",
    }


def free(folder: Path) -> int | None:
    """Bytes free where `folder` is or will be; None when that cannot be read."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
