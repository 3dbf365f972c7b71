"""Who may import whom: cli -> commands -> daemon -> adapters -> core. The core touches no world."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bwd"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))

CORE_MAY = ("bwd.core", "bwd.errors")
"""errors is values only, and stands outside because everybody raises them."""

ADAPTERS_MAY = ("bwd.core", "bwd.errors", "bwd.paths", "bwd.children")
"""children only for what goes over the pipe to them (their report format)."""

READING_SETTINGS = ("bwd.adapters.settings_file", "bwd.adapters.dotenv_file")
"""One adapter in two rooms, whose names differ: the settings are read from a .env file."""


WORLD = frozenset({
    "asyncio", "ctypes", "fcntl", "glob", "http", "io", "logging", "mmap", "multiprocessing", "os",
    "platform",
    "resource", "select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile",
    "threading", "time", "urllib.request",
})  # fmt: skip
"""Standard modules by which a pure room could reach clock, disk, network, processes or environment."""

CALLS = frozenset({"open", "print", "input", "exec", "eval", "__import__"})


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Full names of all that is imported, lazily or not; `from bwd.core import x` counts as bwd.core.x."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            sub = {f"{module}.{alias.name}" for alias in node.names}
            real = {name for name in sub if (ROOT / Path(*name.split("."))).with_suffix(".py").exists()}
            found |= real or {module}
    return found


def of_room(prefix: str) -> list[Path]:
    return [path for path in MODULES if name_of(path).startswith(f"bwd.{prefix}")]


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name == "bwd" or name.startswith("bwd.")}


@pytest.mark.parametrize("path", of_room("core"), ids=name_of)
def test_the_core_imports_only_itself_and_what_is_pure(path: Path) -> None:
    for name in imports(path):
        if name.startswith("bwd"):
            assert name.startswith(CORE_MAY), f"{name}: not the core's"
        else:
            assert name.split(".")[0] in sys.stdlib_module_names, f"{name}: not in the standard library"
            assert not {name, name.split(".")[0]} & WORLD, f"{name}: the world"


@pytest.mark.parametrize("path", of_room("core"), ids=name_of)
def test_the_core_reads_no_clock_and_no_file(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in CALLS, f"line {node.lineno}: {node.func.id}()"
        if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today"):
            value = ast.unparse(node.value)
            assert value not in ("datetime", "datetime.datetime", "date", "datetime.date"), (
                f"line {node.lineno}: a clock"
            )


def family(name: str) -> str:
    """An adapter that outgrew one room keeps its name as the first word: weights, weights_store."""
    return name.removeprefix("bwd.adapters.").split("_")[0]


@pytest.mark.parametrize("path", of_room("adapters"), ids=name_of)
def test_adapters_do_not_know_each_other(path: Path) -> None:
    own = name_of(path)
    for name in ours(path) - {"bwd", "bwd.adapters"}:
        same = name.startswith("bwd.adapters.") and family(name) == family(own)
        assert same or (own, name) == READING_SETTINGS or name.startswith(ADAPTERS_MAY), (
            f"{own} imports {name}"
        )


@pytest.mark.parametrize("path", of_room("daemon"), ids=name_of)
def test_the_daemon_knows_no_command(path: Path) -> None:
    for name in ours(path):
        assert not name.startswith(("bwd.commands", "bwd.cli", "bwd.front")), name


@pytest.mark.parametrize("path", of_room("commands"), ids=name_of)
def test_commands_do_not_know_the_command_line(path: Path) -> None:
    for name in ours(path):
        assert not name.startswith(("bwd.cli", "bwd.__main__")), name


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_of_ours_imports_the_engine_in_the_light_environment(path: Path) -> None:
    if name_of(path).startswith("bwd.children"):
        return  # children run under the engine's Python
    heavy = {name.split(".")[0] for name in imports(path)} & {"torch", "vllm", "transformers", "numpy"}
    assert not heavy
