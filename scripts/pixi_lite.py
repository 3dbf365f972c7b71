"""The part of pixi that this repository needs, for machines without pixi or without a conda channel: ./pixiw.

    pixi_lite.py run [-e ENV] TASK [ARGS...]     a task of pixi.toml, or any command, in an environment
    pixi_lite.py install [-e ENV]                make or repair .venv/ENV; progress on stdout
    pixi_lite.py shell [-e ENV]                  a shell in an environment
    pixi_lite.py task list                       the tasks
    pixi_lite.py wheel NAME DIR                  unpack a wheel of pixi.toml [tool.bwd.wheels] into DIR
    pixi_lite.py wheels DIR NAME...              fetch the wheels of environments, and such wheels, into DIR

It resolves nothing, never writes the lock, and refuses what only pixi can do. Compilers, cmake and git of the
conda half must come from the system. Standard library alone, Python 3.11.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pixi_install import PYTHON, InstallError, clear, ensure, fetch_wheel
from pixi_manifest import DEFAULT, Manifest, ManifestError, Task

ROOT = Path(__file__).resolve().parent.parent
USAGE = "usage: pixiw run [-e ENV] TASK [ARGS...] | install [-e ENV] | shell [-e ENV] | task list"
# A command with nothing in it for a shell to do, unless its first word is the shell's own.
PLAIN = re.compile(r"[\w@%+=:,./ -]+")
BUILTINS = frozenset(
    [".", "cd", "command", "exec", "exit", "export", "set", "source", "ulimit", "umask", "unset"]
)


class UsageError(Exception):
    """The command line asks for what is not there; the text is one line for people."""


def expand(value: str, environ: Mapping[str, str]) -> str:
    """$NAME and ${NAME} of an activation or task variable; an unknown one is empty, as in a shell."""
    return re.sub(r"\$(\w+|\{\w+\})", lambda match: environ.get(match[1].strip("{}"), ""), value)


def environment_of(manifest: Manifest, name: str, venv: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that pixi sets for an environment, then the manifest's own ([activation.env])."""
    workspace = manifest.table["workspace"]
    out = {k: v for k, v in environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    out |= {
        "CONDA_DEFAULT_ENV": name,
        "CONDA_PREFIX": str(venv),
        "INIT_CWD": os.getcwd(),
        "PATH": f"{venv / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}",
        "PIXI_ENVIRONMENT_NAME": name,
        "PIXI_IN_SHELL": "1",
        "PIXI_PROJECT_MANIFEST": str(ROOT / "pixi.toml"),
        "PIXI_PROJECT_NAME": str(workspace.get("name", "")),
        "PIXI_PROJECT_ROOT": str(ROOT),
        "PIXI_PROJECT_VERSION": str(workspace.get("version", "")),
        "VIRTUAL_ENV": str(venv),
    }
    for key, value in manifest.activation_env(name).items():
        out[key] = expand(value, out)
    return out


def bind(task: Task, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The values of a task's named arguments, and the words passed through to its command."""
    if not task.args:
        return {}, list(words)
    given, extra = list(words), []
    if "--" in given:
        place = given.index("--")
        given, extra = given[:place], given[place + 1 :]
    if len(given) > len(task.args):
        raise UsageError(
            f"task '{task.name}' received more arguments than expected; use -- before extra ones"
        )
    values = {}
    for place, argument in enumerate(task.args):
        value = given[place] if place < len(given) else argument.default
        if value is None:
            raise UsageError(f"task '{task.name}' needs the argument '{argument.name}'")
        if argument.choices and value not in argument.choices:
            choices = ", ".join(argument.choices)
            raise UsageError(
                f"got '{value}' for argument '{argument.name}' of task '{task.name}', choose from: {choices}"
            )
        values[argument.name] = value
    return values, extra


def render(text: str, values: Mapping[str, str], task: str) -> str:
    """{{ name }} of a command. Other templates need pixi and are refused."""

    def value(match: re.Match[str]) -> str:
        if match[1].strip() not in values:
            raise ManifestError(f"task '{task}': the template {match[0]} needs pixi itself")
        return values[match[1].strip()]

    return re.sub(r"\{\{(.*?)\}\}", value, text)


def command_of(task: Task, given: Sequence[str]) -> list[str]:
    """The argv of a task: its own words where no shell is needed, so that a signal reaches the program
    itself."""
    values, extra = bind(task, given)
    text = render(task.cmd or "", values, task.name)
    words = text.split()
    if PLAIN.fullmatch(text) and words[0] not in BUILTINS and "=" not in words[0]:
        return [*words, *extra]
    return ["sh", "-c", " ".join([text, *map(shlex.quote, extra)])]


class Runner:
    """Runs a task after those it depends on, each of them once."""

    def __init__(self, manifest: Manifest, asked: str | None) -> None:
        self.manifest, self.asked = manifest, asked
        self.done: set[tuple[str, tuple[str, ...], str]] = set()

    def environment(self, task: Task) -> str:
        return self.asked or task.environment or DEFAULT

    def prepare(self, task: Task, words: Sequence[str]) -> None:
        """Runs what the task depends on. Raises SystemExit with the code of the first that fails."""
        values, _ = bind(task, words)
        for item in task.depends_on:
            first = self.manifest.task(item.task, item.environment or self.asked or DEFAULT)
            args = tuple(render(word, values, task.name) for word in item.args)
            environment = item.environment or self.environment(first)
            if (first.name, args, environment) in self.done:
                continue
            self.done.add((first.name, args, environment))
            self.prepare(first, args)
            if first.cmd is not None:
                argv, environ, folder = self.call(first, args, environment)
                code = subprocess.run(argv, env=environ, cwd=folder, check=False).returncode
                if code:
                    sys.exit(code if code > 0 else 128 - code)

    def call(
        self, task: Task, words: Sequence[str], environment: str
    ) -> tuple[list[str], dict[str, str], Path]:
        """argv, environment and working directory of a task."""
        venv = ensure(ROOT, self.manifest, environment, say_error)
        environ = environment_of(self.manifest, environment, venv, os.environ)
        for key, value in task.env.items():
            environ[key] = expand(render(value, bind(task, words)[0], task.name), environ)
        return command_of(task, words), environ, ROOT / task.cwd

    def run(self, name: str, words: Sequence[str]) -> NoReturn:
        """The task, or the command of that name, in place of this process."""
        tasks = self.manifest.tasks(self.asked or DEFAULT)
        if name in tasks:
            task = tasks[name]
            self.prepare(task, words)
            if task.cmd is None:
                sys.exit(0)
            replace(*self.call(task, words, self.environment(task)))
        environment = self.asked or DEFAULT
        venv = ensure(ROOT, self.manifest, environment, say_error)
        environ = environment_of(self.manifest, environment, venv, os.environ)
        if not shutil.which(name, path=environ["PATH"]):
            self.manifest.task(name, environment)  # raises, with the list of tasks
        replace([name, *words], environ, Path.cwd())


def replace(argv: list[str], environ: dict[str, str], folder: Path) -> NoReturn:
    """Becomes the program. A program that is not there ends with 127, as in a shell."""
    os.chdir(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], argv, environ)
    except FileNotFoundError:
        print(f"pixiw: {argv[0]}: command not found", file=sys.stderr)
        sys.exit(127)


def say_error(line: str) -> None:
    print(f"pixiw: {line}", file=sys.stderr, flush=True)


def say(line: str) -> None:
    print(f"pixiw: {line}", flush=True)


def options(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """-e ENV, and the words after the options."""
    rest, environment = list(words), None
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        if word in ("-e", "--environment"):
            if not rest:
                raise UsageError(f"{word} needs the name of an environment")
            environment = rest.pop(0)
        elif word.startswith("--environment="):
            environment = word.partition("=")[2]
        elif word not in ("--locked", "--frozen", "-q", "--quiet", "-v", "--verbose"):
            raise UsageError(f"the option {word} needs pixi itself")
    return environment, rest


def list_tasks(manifest: Manifest) -> None:
    tasks = {name: task for name, task in manifest.tasks().items() if not name.startswith("_")}
    width = max(map(len, tasks), default=0)
    for name, task in sorted(tasks.items()):
        print(f"{name:{width}}  {task.description}".rstrip())


def main(argv: Sequence[str]) -> int:
    """Exit code: the task's own; 1 when an environment cannot be made; 2 for a wrong command line."""
    verb, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if verb in ("--help", "-h", "help"):
        print(USAGE)
        return 0
    if verb == "--version":
        print("pixiw (pixi_lite) of bwd")
        return 0
    manifest = Manifest.read(ROOT / "pixi.toml")
    if verb == "run":
        environment, words = options(rest)
        if environment is not None:
            manifest.features(environment)
        if words:
            Runner(manifest, environment).run(words[0], words[1:])
        list_tasks(manifest)
        return 0
    if verb == "install":
        environment, words = options(rest)
        if words:
            raise UsageError(f"install takes no '{words[0]}'")
        manifest.features(environment or DEFAULT)
        venv = ensure(ROOT, manifest, environment or DEFAULT, say)
        say(f"{environment or DEFAULT}: {venv}")
        return 0
    if verb in ("shell", "shell-hook"):
        environment, words = options(rest)
        if verb == "shell-hook" or words:
            raise UsageError(f"{verb} {' '.join(words)}".strip() + " needs pixi itself")
        venv = ensure(ROOT, manifest, environment or DEFAULT, say_error)
        environ = environment_of(manifest, environment or DEFAULT, venv, os.environ)
        replace([environ.get("SHELL") or "/bin/sh"], environ, Path.cwd())
    if verb == "task" and list(rest) in (["list"], ["ls"]):
        list_tasks(manifest)
        return 0
    if verb == "clean":
        environment, _ = options(rest)
        for name in [environment] if environment else manifest.environments:
            clear(ROOT / ".venv" / name)
        return 0
    if verb == "wheel" and len(rest) == 2:
        fetch_wheel(ROOT, manifest, rest[0], Path(rest[1]).absolute(), say)
        return 0
    if verb == "wheels" and len(rest) >= 2:
        import pixi_bundle

        pixi_bundle.fetch(ROOT, pixi_bundle.wanted(ROOT, manifest, rest[1:]), Path(rest[0]).absolute(), say)
        return 0
    raise UsageError(f"'{' '.join(argv[:2])}' needs pixi itself; {USAGE}")


def guarded(argv: Sequence[str]) -> int:
    """main, with one line on stderr for everything that a person can meet."""
    if sys.version_info[:2] != PYTHON:
        have = ".".join(map(str, sys.version_info[:2]))
        say_error(
            f"this is Python {have}, and the lock's wheels are for {'.'.join(map(str, PYTHON))}; use ./pixiw"
        )
        return 1
    try:
        return main(argv)
    except UsageError as error:
        say_error(str(error))
        return 2
    except (ManifestError, InstallError) as error:
        say_error(str(error))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            say_error(f"disk full: {error}; make room under {ROOT} and call again")
        else:
            say_error(f"{error.strerror or error}: {error.filename or ROOT}")
    except KeyboardInterrupt:
        say_error("interrupted; the next call repairs what is half made")
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(guarded(sys.argv[1:]))
