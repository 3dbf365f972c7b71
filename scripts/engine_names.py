"""Write down the names that the pinned engine knows.

    python scripts/engine_names.py --engine .venv/cpu/bin/python     # bwd/core/engine_names.py
    python scripts/engine_names.py --nccl ../nccl --tag 56a0c229     # bwd/core/nccl_names.py
    python scripts/engine_names.py --engine ... --check              # compare only, exit 1 on a difference

vLLM's come from the engine itself: the argument parser of its OpenAI server, `vllm.envs` and its
registries. NCCL's come from a checkout of NVIDIA/nccl: its NCCL_PARAM table and the names quoted in
its sources. Run it when the pin moves.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENGINE_FILE = ROOT / "bwd" / "core" / "engine_names.py"
NCCL_FILE = ROOT / "bwd" / "core" / "nccl_names.py"

# Runs under the engine's Python, which need not have bwd.
ASK_ENGINE = """
import json, sys
import vllm.envs, vllm.version
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.reasoning import ReasoningParserManager
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
value, switch, many, choices = [], [], [], {}
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    if not action.option_strings or action.dest == "help":
        continue
    kind = switch if action.nargs == 0 else value if action.nargs in (None, "?", 1) else many
    kind.extend(action.option_strings)
    if action.choices:
        choices[action.dest] = [str(choice) for choice in action.choices]
json.dump({
    "version": vllm.version.__version__.split("+")[0],
    "value": sorted(value), "switch": sorted(switch), "many": sorted(many),
    "env": sorted(vllm.envs.environment_variables),
    "attention": sorted(AttentionBackendEnum.__members__),
    "reasoning": sorted(ReasoningParserManager.list_registered()),
    "quantization": sorted(QUANTIZATION_METHODS),
    "dtype": sorted(choices["dtype"]), "kv_cache_dtype": sorted(choices["kv_cache_dtype"]),
}, sys.stdout)
"""


def ask_engine(python: str) -> dict[str, Any]:
    """The names, read from the vLLM that `python` can import. Raises CalledProcessError."""
    done = subprocess.run([python, "-c", ASK_ENGINE], check=True, capture_output=True, text=True)
    # vLLM may print notices before the answer; the answer is the last line.
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _words(name: str, doc: str, words: list[str]) -> str:
    body = "\n".join(textwrap.wrap(" ".join(words), 100, break_long_words=False, break_on_hyphens=False))
    return f'{name}: Final = frozenset(\n    """\n{body}\n""".split()\n)\n"""{doc}"""\n'


def engine_module(names: dict[str, Any]) -> str:
    version = names["version"]
    parts = [
        f'"""Names that vLLM {version} knows. Written by scripts/engine_names.py; do not edit."""\n',
        "# ruff: noqa: SIM905 - words, wrapped, read better than one name a line\n",
        "from __future__ import annotations\n\nfrom typing import Final\n",
        f'VLLM_VERSION: Final = "{version}"\n',
        _words("FLAGS_WITH_VALUE", "Flags followed by one value.", names["value"]),
        _words("FLAGS_SWITCH", "Flags followed by nothing.", names["switch"]),
        _words("FLAGS_WITH_VALUES", "Flags followed by one value or more.", names["many"]),
        _words("ENVIRONMENT", "Variables that vLLM reads (vllm.envs).", names["env"]),
        _words("ATTENTION_BACKENDS", "Values of --attention-backend.", names["attention"]),
        _words("REASONING_PARSERS", "Values of --reasoning-parser.", names["reasoning"]),
        _words("QUANTIZATIONS", "Values of --quantization.", names["quantization"]),
        _words("DTYPES", "Values of --dtype.", names["dtype"]),
        _words("KV_CACHE_DTYPES", "Values of --kv-cache-dtype.", names["kv_cache_dtype"]),
    ]
    return "\n".join(parts)


def nccl_module(repo: str, tag: str) -> str:
    """The module text for a checkout. Parameters of `_test` programs and of plugins are left out:
    only src/ counts."""
    source = subprocess.run(
        ["git", "-C", repo, "grep", "-h", "-E", 'NCCL_PARAM|"NCCL_', tag, "--", "src"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    version = subprocess.run(
        ["git", "-C", repo, "show", f"{tag}:makefiles/version.mk"], check=True, capture_output=True, text=True
    ).stdout
    number = ".".join(re.findall(r"NCCL_(?:MAJOR|MINOR|PATCH)\s*:=\s*(\d+)", version))
    names = {"NCCL_" + name for name in re.findall(r'NCCL_PARAM\(\s*\w+\s*,\s*"(\w+)"', source)}
    # The levels, NCCL_DEBUG and the plugin names reach getenv by way of functions: any quoted whole name.
    names |= set(re.findall(r'"(NCCL_[A-Z0-9_]+[A-Z0-9])"', source))
    return (
        f'"""Variables that NCCL {number} reads. Written by scripts/engine_names.py; do not edit."""\n\n'
        "# ruff: noqa: SIM905 - words, wrapped, read better than one name a line\n\n"
        f"from __future__ import annotations\n\nfrom typing import Final\n\n"
        f'NCCL_VERSION: Final = "{number}"\n\n'
        + _words(
            "NCCL_ENVIRONMENT", "From NCCL_PARAM and the quoted names in NVIDIA/nccl src/.", sorted(names)
        )
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the names that the pinned vLLM and NCCL know.")
    parser.add_argument("--engine", metavar="PYTHON", help="a Python with the pinned vLLM")
    parser.add_argument("--nccl", metavar="CHECKOUT", help="a git checkout of NVIDIA/nccl")
    parser.add_argument("--tag", default="HEAD", help="the commit of --nccl to read")
    parser.add_argument("--check", action="store_true", help="compare with the tree, write nothing")
    args = parser.parse_args(argv)
    if not args.engine and not args.nccl:
        parser.error("give --engine, --nccl or both")
    texts: dict[Path, str] = {}
    try:
        if args.engine:
            texts[ENGINE_FILE] = engine_module(ask_engine(args.engine))
        if args.nccl:
            texts[NCCL_FILE] = nccl_module(args.nccl, args.tag)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        print(f"engine_names: {detail[-1]}", file=sys.stderr)
        return 1
    different = [p for p, text in texts.items() if not p.exists() or p.read_text("utf-8") != text]
    for path in different:
        print(f"{path.relative_to(ROOT)}: {'differs' if args.check else 'written'}")
        if not args.check:
            path.write_text(texts[path], "utf-8")
    return 1 if args.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
