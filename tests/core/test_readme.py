"""The pages people start from: every command they name exists, every page they name is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bwd.cli import VERBS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


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
    # docs/source_files is of pixi's repository
    for name in re.findall(r"\bdocs/(?!source_files)[\w./-]+", page.read_text("utf-8")):
        assert (REPOSITORY / name.rstrip(".")).exists(), name
