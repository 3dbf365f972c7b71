"""The pages people start from: every command they name exists, every page they name is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bwd.cli import VERBS

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = ("README.md", "docs/supervision.md", "docs/status.md", "docs/exit-codes.md", "docs/proven.md")
PAGES = [REPOSITORY / name for name in NAMES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_verb_that_a_page_names_exists(page: Path) -> None:
    verbs = {verb.name for verb in VERBS} | {"COMMAND", "VERB"}
    tasks = set(tomllib.loads((REPOSITORY / "pixi.toml").read_text())["tasks"]) | {"COMMAND"}
    text = page.read_text("utf-8")
    for word in re.findall(r"`bwd ([a-zA-Z][\w-]*)", text):
        assert word in verbs, f"bwd {word}"
    for word in re.findall(r"(?:pixi|pixiw) run ([a-zA-Z][\w-]*)", text):
        assert word in tasks, f"pixi run {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_that_a_page_names_is_there(page: Path) -> None:
    for name in re.findall(r"\bdocs/[\w./-]+", page.read_text("utf-8")):
        assert (REPOSITORY / name.rstrip(".")).exists(), name
