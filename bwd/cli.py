"""The command line: which verb is which module, and how a command ends. No logic of its own.

A verb's module is imported only when the verb is used: `bwd --help` must stay under 0.3 s.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from bwd.errors import BwdError, ProblemsError


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: the module in bwd.commands, one line of help, an example. A hidden verb is for
    supervisord and the scripts, not for people."""

    name: str
    module: str
    help: str
    example: str
    hidden: bool = False


VERBS = (
    Verb("serve", "serve", "start everything and wait until the model answers", "bwd serve"),
    Verb("stop", "stop", "drain and stop the engine, the daemon and supervisord", "bwd stop"),
    Verb("restart", "restart", "drain the engine and start it again", "bwd restart"),
    Verb("status", "status", "what runs, in which phase, on what evidence", "bwd status --watch"),
    Verb("logs", "logs", "output of the engine, bwd, front or supervisord", "bwd logs -f engine"),
    Verb("verify", "verify", "check that what runs is right: environment, answers, speed", "bwd verify"),
    Verb("tune", "tune", "try a few plans here and keep the fastest that is right", "bwd tune --minutes 60"),
    Verb("history", "history", "what happened to the engine, newest last", "bwd history -n 20"),
    Verb("incidents", "incidents", "snapshots taken before a kill: list, show", "bwd incidents last"),
    Verb("reload", "reload", "take .env now; --check: what would that do?", "bwd reload --check draft.env"),
    Verb("config", "config", "the settings in force and where each comes from", "bwd config"),
    Verb("host", "host", "this machine: GPUs, links, cores, driver", "bwd host --json"),
    Verb("doctor", "doctor", "what would make a start fail; p2p: test copies of cards", "bwd doctor p2p"),
    Verb("bench", "bench", "how fast it is, against what the memory allows", "bwd bench serve --quick"),
    Verb("build", "build", "compile vLLM from its pinned sources for these cards", "bwd build --arch 12.0"),
    Verb("weights", "weights", "models on disk: list, verify, prune, export, import", "bwd weights list"),
    Verb("bundle", "bundle", "carry all of it to a machine without a network", "bwd bundle /media/usb/bwd"),
    Verb("supervisorctl", "supervisorctl", "supervisorctl with our socket", "bwd supervisorctl status"),
    Verb("install-service", "install_service", "start at boot (systemd)", "bwd install-service --print"),
    Verb("daemon", "daemon", "the daemon itself, as supervisord runs it", "bwd daemon", hidden=True),
    Verb("tune-restore", "tune_restore", "puts things back", "bwd tune-restore", hidden=True),
    Verb("front", "front", "the listener itself, as supervisord runs it", "bwd front", hidden=True),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (bwd.core.exit_codes)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = _named(arguments)
    if verb is None:
        return _general(arguments)
    module = import_module(f"bwd.commands.{verb.module}")
    if getattr(module, "RAW", False):
        return _guarded(lambda: module.raw(arguments[1:]))
    parser = argparse.ArgumentParser(
        prog=f"bwd {verb.name}",
        description=verb.help[0].upper() + verb.help[1:] + ".",
        epilog=f"example: {verb.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    args = parser.parse_args(arguments[1:])
    return _guarded(lambda: module.run(args))


def _named(arguments: list[str]) -> Verb | None:
    return next((verb for verb in VERBS if arguments and verb.name == arguments[0]), None)


def _general(arguments: list[str]) -> int:
    """Help, the version, or a verb that does not exist."""
    from bwd.core.exit_codes import MEANING

    width = max(len(verb.name) for verb in VERBS) + 2
    commands = [f"  {verb.name:<{width}}{verb.help}" for verb in VERBS if not verb.hidden]
    codes = [f"  {code.value:<{width}}{meaning}" for code, meaning in MEANING.items()]
    parser = argparse.ArgumentParser(
        prog="bwd",
        usage="bwd COMMAND [options]     (bwd COMMAND --help says more)",
        description="Serves a large language model with vLLM, supervised.",
        epilog="\n".join(["commands:", *commands, "", "exit codes:", *codes, "", "example: bwd serve"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    if not arguments:
        parser.print_help()
        return 0
    if arguments[0].startswith("-"):
        args = parser.parse_args(arguments)
        if args.version:
            from bwd import __version__

            print(f"bwd {__version__}")
        return 0
    return _unknown(arguments[0])


def _unknown(word: str) -> int:
    from difflib import get_close_matches

    names = [verb.name for verb in VERBS if not verb.hidden]
    near = get_close_matches(word, names, n=1)
    meant = f"did you mean `bwd {near[0]}`?" if near else f"the commands are {', '.join(names)}"
    print(f"bwd: there is no command {word!r}; {meant}", file=sys.stderr)
    return 2


def _guarded(run: Callable[[], int]) -> int:
    """Every way a command can end, as an exit code and at most one line a problem."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except ProblemsError as error:
        for problem in error.problems:
            print(f"bwd: {problem.line()}", file=sys.stderr)
        return error.exit_code
    except BwdError as error:
        print(f"bwd: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`bwd logs | head`): not an error of ours, and nothing may
        # be written any more, not even by the interpreter when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
