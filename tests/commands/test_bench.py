"""bench as a program: against a played engine and generator, and against nothing."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bwd.commands import bench
from tests.commands.conftest import Installation, Make
from tests.core.bench_example import example
from tests.core.test_roofline import SMOLLM2
from tests.fakes import bwd_home

GENERATOR = Path(__file__).parents[1] / "fakes" / "load_generator.py"
RESULT = Path(__file__).parents[1] / "core" / "bench_results" / "streams-8.json"


def engine(here: Installation, mode: str = "good") -> Installation:
    """A plan whose Python plays the generator and the copies, and a model folder."""
    python = here.home / "python"
    generator = shlex.join([sys.executable, str(GENERATOR), mode, str(RESULT)])
    python.write_text(
        "#!/bin/sh\n"
        f'[ "$2" = bwd.children.load ] && exec {generator}\n'
        'echo \'{"where": "host", "bytes_per_s": 2e10, "how": "played"}\'\n'
    )
    python.chmod(0o755)
    model = here.home / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(SMOLLM2))
    plan = {
        "python": str(python),
        "model_path": str(model),
        "engine": "cpu",
        "argv": ["python", "--uds", "s"],
    }
    (here.home / "plan.json").write_text(
        json.dumps({**plan, "tensor_parallel_size": 1, "replicas": 1, "gpus": []})
    )
    return here


@pytest.fixture(autouse=True, scope="module")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """matplotlib's list of fonts, made once."""
    folder = tmp_path_factory.mktemp("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def serving(install_once: Make, fonts: Path) -> Installation:
    here = replace(install_once(), extra={"MPLCONFIGDIR": str(fonts)})
    assert here.bwd("serve").code == 0
    return here


def test_nothing_is_measured_where_nothing_runs(install: Make) -> None:
    done = install().bwd("bench", "serve")
    assert (done.code, done.out) == (3, "")
    assert done.err == "bwd: nothing to measure: bwd is not running. Start it with `bwd serve`\n"


def test_an_engine_on_its_way_is_not_measured(install: Make) -> None:
    here = install([[0, bwd_home.status("warming")]])
    here.bwd("serve", "--no-wait")
    done = here.bwd("bench", "serve")
    assert (done.code, done.out) == (4, "")
    assert done.err == "bwd: nothing to measure: the engine is warming, not ready. `bwd status` says why\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["streams-7"], "there is no load 'streams-7'. The loads are single, streams-8"),
        (["--minutes", "0"], "--minutes has to be more than 0"),
        (["--bandwidth", "-1"], "--bandwidth has to be more than 0"),
    ],
)
def test_a_wrong_word_is_one_line(serving: Installation, words: list[str], said: str) -> None:
    done = engine(serving).bwd("bench", "serve", *words)
    assert done.code == 2
    assert done.err.startswith(f"bwd: {said}")
    assert len(done.err.splitlines()) == 1


def test_a_report_is_written_and_shown(serving: Installation, tmp_path: Path) -> None:
    done = engine(serving).bwd("bench", "serve", "streams-8", "--out", str(tmp_path / "a"))
    assert done.code == 0, done.text
    assert "8 streams" in done.out
    assert f"report: {tmp_path / 'a' / 'report.md'}" in done.out
    assert "bench: 8 streams: 8 requests of 128 + 64 tokens" in done.err
    report = bench.read(tmp_path / "a")
    assert (report.subject.model, report.subject.engine, report.quick) == ("demo", "cpu", True)
    assert report.bandwidth.how == "played"
    row = report.rows[0]
    assert row.measured is not None
    assert row.ceiling is not None
    assert row.ratio == pytest.approx(row.measured.tokens_per_s / row.ceiling)
    assert {path.name for path in (tmp_path / "a").iterdir()} >= {
        "report.md",
        "report.json",
        "throughput.png",
    }


def test_a_report_as_data(serving: Installation) -> None:
    done = engine(serving).bwd("bench", "serve", "streams-8", "--json", "--bandwidth", "100")
    data = json.loads(done.out)
    assert data["bandwidth"] == {"bytes_per_s": 1e11, "how": "as given with --bandwidth"}
    assert Path(data["folder"]).parent == serving.state / "bench"
    assert data["rows"][0]["measured"]["completed"] == 8


def test_loads_that_fail_are_told_and_the_rest_is_written(serving: Installation, tmp_path: Path) -> None:
    # the warm-up goes through the same generator, so a generator that always refuses ends the benchmark
    done = engine(serving, "refuse").bwd("bench", "serve", "streams-8", "--out", str(tmp_path / "b"))
    assert done.code == 1
    assert done.err.splitlines()[-1] == "bwd: the load warm-up: ValueError: no"


def test_without_matplotlib_the_report_says_how_to_get_the_plots(
    serving: Installation, tmp_path: Path
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    here = engine(serving)
    less = replace(
        here, extra={**here.extra, "PYTHONPATH": f"{tmp_path / 'hidden'}:{here.environ['PYTHONPATH']}"}
    )
    done = less.bwd("bench", "serve", "streams-8", "--out", str(tmp_path / "c"))
    assert done.code == 0, done.text
    assert f"`pixi run bench plot {tmp_path / 'c'}` draws the plots" in done.out
    assert "No plots: matplotlib is not in this environment" in (tmp_path / "c" / "report.md").read_text()
    assert not list((tmp_path / "c").glob("*.png"))


# ------------------------------------------------------------------ reports
def test_compare_and_plot_read_what_serve_wrote(install: Make, tmp_path: Path) -> None:
    here = install()
    for name, rate in (("a", 120.0), ("b", 60.0)):
        (tmp_path / name).mkdir()
        bench.write(example(rate), tmp_path / name)
    done = here.bwd("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b" / "report.json"))
    assert (done.code, done.err) == (0, "")
    assert "0.50" in done.out
    bench.write(example(model="demo"), tmp_path / "b")
    other = here.bwd("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert other.code == 5
    assert other.out.startswith("not comparable: the models differ: casperhansen/")


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), ("{", "is no benchmark report"), ("[]", "schema None")]
)
def test_what_is_no_report_is_one_line(install: Make, tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    done = install().bwd("bench", "compare", str(tmp_path), str(tmp_path))
    assert done.code == 1
    assert said in done.err
    assert len(done.err.splitlines()) == 1


def test_the_plots_are_pictures_and_the_same_ones_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.write(example(), tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert set(first) == {"throughput.png", "latency.png"}
    assert all(picture.startswith(b"\x89PNG\r\n") for picture in first.values())
    assert bench.plot(tmp_path) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.png")} == first


def test_ctrl_c_keeps_what_was_measured(serving: Installation, tmp_path: Path) -> None:
    """The second load is in the middle when the signal comes."""
    begun = engine(serving, "good").begin(
        "bench", "serve", "streams-8", "streams-32", "--out", str(tmp_path / "d")
    )
    assert begun.stdout is not None
    said = ""
    with begun.stdout:
        for line in begun.stdout:
            said += line
            if line.startswith("bench: 32 streams"):
                begun.send_signal(signal.SIGINT)
    assert begun.wait(60) == 130, said
    assert "32 streams" in said
    report = bench.read(tmp_path / "d")
    assert report.rows[0].measured is not None
    assert (report.rows[1].measured, report.rows[1].note) == (None, "it was interrupted")
