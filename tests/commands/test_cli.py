"""The command line itself: help, exit codes, speed, and that every verb is there."""

from __future__ import annotations

import argparse
import importlib
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bwd.cli import VERBS, Verb, main
from bwd.core.exit_codes import MEANING
from tests.commands.conftest import Make

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("aiohttp", "rich", "supervisor", "huggingface_hub", "watchdog", "pynvml", "asyncio", "xmlrpc")


def help_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bwd", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


def test_help_lists_every_verb_and_every_exit_code() -> None:
    said = help_of("--help")
    assert said.returncode == 0
    for verb in VERBS:
        assert (f"\n  {verb.name} " in said.stdout) is not verb.hidden
    for code, meaning in MEANING.items():
        assert f"{code.value}" in said.stdout
        assert meaning in said.stdout


def test_help_takes_less_than_a_third_of_a_second() -> None:
    """The best of three: another test may be running beside this one."""
    took = []
    for _ in range(3):
        began = time.perf_counter()
        help_of("--help")
        took.append(time.perf_counter() - began)
    assert min(took) < 0.3


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--help"], ["serve", "--help"], ["nonsense"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    script = f"""
import contextlib, sys
sys.argv = ["bwd", *{arguments!r}]
from bwd.cli import main
with contextlib.suppress(SystemExit):
    main()
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if verb.name != "supervisorctl"], ids=lambda verb: verb.name
)
def test_every_verb_has_its_module_and_an_example(verb: Verb) -> None:
    module = importlib.import_module(f"bwd.commands.{verb.module}")
    parser = argparse.ArgumentParser()
    module.configure(parser)
    assert callable(module.run)
    assert verb.example.startswith(f"bwd {verb.name}")


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if not verb.hidden and verb.name != "supervisorctl"], ids=lambda v: v.name
)
def test_every_help_ends_with_its_example(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([verb.name, "--help"])
    assert end.value.code == 0
    assert f"example: {verb.example}" in capsys.readouterr().out


def test_a_misspelt_verb_is_a_usage_error_with_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stauts"]) == 2
    assert capsys.readouterr().err == "bwd: there is no command 'stauts'; did you mean `bwd status`?\n"


def test_an_unknown_option_is_a_usage_error() -> None:
    assert help_of("status", "--jsn").returncode == 2


def test_the_version() -> None:
    assert help_of("--version").stdout.startswith("bwd 0.")


def test_a_reader_that_leaves_is_no_error(install: Make) -> None:
    here = install()
    here.paths.make()
    (here.paths.logs / "bwd.log").write_text("line\n" * 100_000)
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m bwd logs bwd -n 100000 | head -1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", env=here.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["line", "141"]
    assert done.stderr == ""
