"""./pixiw runs the tasks of pixi.toml as pixi does."""

from __future__ import annotations

import json
import signal
import statistics
import time
from pathlib import Path

import pytest

import bwd.cli
from pixi_manifest import Manifest
from tests.env.stage import BASE_PYTHON, ROOT, Stage, make_wheel

SHOW = "python -c 'import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))'"
TASKS = f"""
[tasks]
show = "{SHOW}"
fail = "exit 7"
plain = "python marker.py"
never = {{ cmd = "printf never", depends-on = ["fail"] }}

[tasks.fit]
args = [{{ arg = "what" }}, {{ arg = "how", default = "fast", choices = ["fast", "slow"] }}]
cmd = "printf '%s|' {{{{ what }}}} {{{{ how }}}}"
description = "fits a thing"

[tasks.first]
cmd = "printf first:"

[tasks.second]
cmd = "printf second:"
depends-on = ["first"]

[tasks.both]
cmd = "printf both"
depends-on = ["first", "second", {{ task = "fit", args = ["x", "slow"] }}]

[tasks.inside]
cmd = "{SHOW}"
cwd = "sub folder"
env = {{ GREETING = "from the task", OWN = "${{PIXI_PROJECT_NAME}}!" }}

[tasks.developers]
cmd = "printf $PIXI_ENVIRONMENT_NAME"
default-environment = "dev"

[tasks.odd]
cmd = "printf {{{{ pixi.platform }}}}"

[feature.other.tasks]
show = "printf other-show"
"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    stage = Stage.make(tmp_path_factory.mktemp("tasks"), "a repo")
    stage.manifest(TASKS)
    stage.lock(make_wheel(stage.links, "marker", "1.0"))
    (stage.root / "sub folder").mkdir()
    (stage.root / "marker.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    assert stage.call("install").returncode == 0
    return stage


def shown(stage: Stage, *words: str, cwd: Path | None = None) -> tuple[list[str], str, dict[str, str]]:
    done = stage.call(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    arguments, folder, environ = json.loads(done.stdout)
    return arguments, folder, environ


def test_a_task_gets_the_words_after_it(stage: Stage) -> None:
    arguments, _, _ = shown(stage, "run", "show", "--flag", "two words", "-e", "$HOME", "--", "'")
    assert arguments == ["--flag", "two words", "-e", "$HOME", "--", "'"]


def test_a_task_runs_in_the_repository_wherever_the_call_came_from(stage: Stage, tmp_path: Path) -> None:
    _, folder, environ = shown(stage, "run", "show", cwd=tmp_path)
    assert (folder, environ["INIT_CWD"]) == (str(stage.root), str(tmp_path))


def test_a_task_has_the_variables_of_pixi_and_of_the_activation(stage: Stage) -> None:
    _, _, environ = shown(stage, "run", "show")
    assert environ["PIXI_PROJECT_ROOT"] == environ["PYTHONPATH"] == str(stage.root)
    assert environ["CONDA_PREFIX"] == environ["VIRTUAL_ENV"] == str(stage.root / ".venv/default")
    assert environ["PATH"].startswith(str(stage.root / ".venv/default/bin") + ":")
    assert environ["GREETING"] == "hello default"


def test_a_tasks_own_variables_win_and_it_has_its_folder(stage: Stage) -> None:
    _, folder, environ = shown(stage, "run", "inside")
    assert folder == str(stage.root / "sub folder")
    assert (environ["GREETING"], environ["OWN"]) == ("from the task", "stage!")


def test_arguments_defaults_and_choices(stage: Stage) -> None:
    assert stage.call("run", "fit", "x").stdout == "x|fast|"
    assert stage.call("run", "fit", "x", "slow").stdout == "x|slow|"
    assert stage.call("run", "fit", "x", "--", "more", "words").stdout == "x|fast|more|words|"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit"], "task 'fit' needs the argument 'what'"),
        (["fit", "x", "late"], "got 'late' for argument 'how' of task 'fit', choose from: fast, slow"),
        (
            ["fit", "x", "slow", "z"],
            "task 'fit' received more arguments than expected; use -- before extra ones",
        ),
        (["-e"], "-e needs the name of an environment"),
        (["--clean-env", "show"], "the option --clean-env needs pixi itself"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(stage: Stage, words: list[str], message: str) -> None:
    done = stage.call("run", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[1:] == [f"pixiw: {message}"]


def test_what_only_pixi_can_do_is_refused(stage: Stage) -> None:
    assert "needs pixi itself" in stage.call("run", "odd").stderr
    assert stage.call("add", "numpy").returncode == 2


def test_dependencies_run_first_and_once(stage: Stage) -> None:
    done = stage.call("run", "both")
    assert done.stdout == "first:second:x|slow|both"


def test_a_failed_dependency_ends_it_with_its_code(stage: Stage) -> None:
    done = stage.call("run", "never")
    assert (done.returncode, done.stdout) == (7, "")


def test_the_exit_code_is_the_tasks_own(stage: Stage) -> None:
    assert stage.call("run", "fail").returncode == 7


def test_a_task_runs_in_its_own_environment_unless_another_is_asked_for(stage: Stage) -> None:
    assert stage.call("run", "developers").stdout == "dev"
    assert stage.call("run", "-e", "other", "developers").stdout == "other"
    assert stage.call("run", "-e", "other", "show").stdout == "other-show"


def test_a_command_that_is_no_task_runs_in_the_environment(stage: Stage) -> None:
    done = stage.call("run", "python", "-c", "import sys; print(sys.prefix)")
    assert done.stdout.strip() == str(stage.root / ".venv/default")


def test_an_unknown_task_names_the_known_ones(stage: Stage) -> None:
    done = stage.call("run", "srve")
    assert done.returncode == 1
    assert "no task 'srve' in pixi.toml; there are: both, developers," in done.stderr


def test_an_unknown_environment_names_the_known_ones(stage: Stage) -> None:
    done = stage.call("run", "-e", "gpu", "show")
    assert done.returncode == 1
    assert "no environment 'gpu' in pixi.toml; there are: default, dev, other" in done.stderr


def test_the_tasks_are_listed(stage: Stage) -> None:
    for words in (["run"], ["task", "list"]):
        assert "fit         fits a thing\n" in stage.call(*words).stdout


def test_a_signal_reaches_the_program_itself(stage: Stage) -> None:
    child = stage.start("run", "plain")
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=10)
    assert child.returncode == -signal.SIGTERM


def test_one_line_says_that_it_is_not_pixi(stage: Stage) -> None:
    done = stage.call("run", "first")
    assert done.stdout == "first:"
    assert done.stderr == (
        "pixiw: no pixi on PATH: running from the wheels of pixi.lock in .venv (docs/environment.md)\n"
    )


def test_with_pixi_on_path_it_is_pixi_held_to_the_lock(stage: Stage, tmp_path: Path) -> None:
    stage.program("pixi", 'printf "%s|" "$PIXI_LOCKED" "$PWD" "$@"\n')
    try:
        done = stage.call("run", "-e", "dev", "show", "two words", cwd=tmp_path)
        off = stage.call("run", "first", PIXIW_PIXI="off")
    finally:
        (stage.bin / "pixi").unlink()
    assert (done.stdout, done.stderr) == (f"true|{stage.root}|run|-e|dev|show|two words|", "")
    assert off.stdout == "first:"


def test_a_second_call_starts_the_task_within_half_a_second(stage: Stage) -> None:
    took = []
    for _ in range(5):
        began = time.monotonic()
        assert stage.call("run", "true").returncode == 0
        took.append(time.monotonic() - began)
    assert statistics.median(took) < 0.5


def test_without_python_3_11_one_line_names_what_would_work(stage: Stage) -> None:
    link = stage.root / ".venv" / ".python"
    link.unlink()
    uv = (stage.bin / "uv").resolve()
    stage.program("uv", "exit 2\n")
    try:
        offered = stage.call("run", "first", PIXIW_PYTHON="")
        (stage.bin / "uv").unlink()
        bare = stage.call("run", "first", PIXIW_PYTHON="")
    finally:
        stage.program("uv", target=uv)
        link.symlink_to(BASE_PYTHON)
    pixi = "install pixi, which brings its own: curl -fsSL https://pixi.sh/install.sh | sh\n"
    assert (bare.returncode, bare.stderr) == (1, f"pixiw: no Python 3.11 found: {pixi}")
    assert offered.stderr == f'pixiw: no Python 3.11 found: run "uv python install 3.11", or {pixi}'


def test_the_commands_of_the_real_manifest_exist() -> None:
    """No task is listed before its command is there."""
    verbs = {verb.name for verb in bwd.cli.VERBS}
    for task in Manifest.read(ROOT / "pixi.toml").tasks().values():
        words = (task.cmd or "").split()
        if words[:3] == ["python", "-m", "bwd"] and len(words) > 3:
            assert words[3] in verbs, task.name


def test_no_variable_of_a_shell_makes_every_start_compile_its_modules_again() -> None:
    """Python takes the empty value for "not set"; pixi and pixiw both take it from here."""
    for environment in ("default", "dev", "cpu", "cuda"):
        assert Manifest.read(ROOT / "pixi.toml").activation_env(environment)["PYTHONDONTWRITEBYTECODE"] == ""
