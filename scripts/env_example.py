"""Write what documents the settings, from the one list in bwd/core/keys.py.

    python scripts/env_example.py           # env/.env.example, docs/settings.md, README.md
    python scripts/env_example.py --check   # compare only, exit 1 on a difference

The pages are written by hand around two markers, <!-- settings --> and <!-- /settings -->; what
stands between them is written here.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bwd.core.keys import GROUPS, KEYS, NCCL, Key  # noqa: E402

EXAMPLE = ROOT / "env" / ".env.example"
PAGES = {ROOT / "docs" / "settings.md": "long", ROOT / "README.md": "short"}
CHANGE = {
    "live": "A change is applied while the engine runs.",
    "restart": "A change restarts the engine.",
    "none": "A change counts through the keys that it sets.",
}
_BETWEEN = re.compile(r"(?<=<!-- settings -->\n).*?(?=<!-- /settings -->)", re.DOTALL)


def env_example() -> str:
    """A `.env` in which every key stands as a comment with what it is: valid as it is, and with any
    or all of its # removed."""
    lines = [
        "# Settings of bwd. Copy this file to .env, remove the # before a key and set its value.",
        "# A value is literal: nothing is expanded. # after a space starts a comment. Empty means: not set.",
        "# bwd sees a saved change by itself; `bwd config` shows what is in force and where it comes from.",
    ]
    for group in GROUPS:
        lines += ["", f"# ---- {group} ".ljust(100, "-")]
        for key in (k for k in KEYS.values() if k.group == group):
            lines += ["", *_comment(key), f"#{assignment(key)}"]
    return "\n".join(lines) + "\n"


def assignment(key: Key) -> str:
    """The example as a line of `.env`; a value with a space in it in quotes."""
    if key is NCCL:
        return key.example
    quoted = f"'{key.example}'" if " " in key.example else key.example
    return f"{key.name}={quoted}"


def _comment(key: Key) -> list[str]:
    default = key.default or "not set"
    doc = textwrap.wrap(key.doc.replace("`", ""), 98, break_on_hyphens=False)
    return [f"# {line}" for line in [*doc, f"Default: {default}. {CHANGE[key.change]}"]]


def table(kind: str) -> str:
    """The keys as a Markdown table, grouped; the long one says where each value goes."""
    long = kind == "long"
    head = "| Key | Default | Example | What it is |" + (" Goes to | A change |" if long else "")
    rows = [head, "|---|---|---|---|" + ("---|---|" if long else "")]
    for group in GROUPS:
        for key in (k for k in KEYS.values() if k.group == group):
            doc = key.doc if long else key.doc.split(". ")[0].rstrip(".") + "."
            default = f"`{key.default}`" if key.default else ""
            row = f"| `{key.name}` | {default} | `{key.example}` | {doc.replace('|', chr(92) + '|')} |"
            rows.append(row + (f" {key.reaches} | {key.change} |" if long else ""))
    return "\n".join(rows) + "\n"


def texts() -> dict[Path, str]:
    """Each file and what it should hold. A page without the markers is not ours to write."""
    found = {EXAMPLE: env_example()}
    for page, kind in PAGES.items():
        if page.exists():
            text = page.read_text("utf-8")
            between = _BETWEEN.search(text)
            if between is not None:
                found[page] = f"{text[: between.start()]}\n{table(kind)}\n{text[between.end() :]}"
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write what documents the settings.")
    parser.add_argument("--check", action="store_true", help="compare with the tree, write nothing")
    args = parser.parse_args(argv)
    different = [
        path for path, text in texts().items() if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in different:
        print(f"{path.relative_to(ROOT)}: {'differs' if args.check else 'written'}")
        if not args.check:
            path.write_text(texts()[path], "utf-8")
    return 1 if args.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
