"""Do two builds of the engine, or two plans, give the same text?

    python scripts/compare_answers.py ask --url http://127.0.0.1:8000 --out a1.json
    python scripts/compare_answers.py ask --url http://127.0.0.1:8000 --together 8 --out a2.json
    ... the other build in its place ...
    python scripts/compare_answers.py ask --url http://127.0.0.1:8000 --out b.json
    python scripts/compare_answers.py compare a1.json a2.json b.json

The first two are the same build twice (another batch size, or after a restart): their difference is the
measure. More runs make it a better one: `compare a1.json a2.json a3.json --against b1.json b2.json`.
The rule is bwd/core/same_text.py's. `compare` ends with 0 when the text is the same, 1 when it is not.
Standard library only, Python 3.11 or newer. A key of the API is read from the variable API_KEY.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bwd.adapters import api_answers
from bwd.adapters.api_client import Api
from bwd.core.prompts import PROMPTS
from bwd.core.same_text import DRIFT_LIMIT, Answer, Comparison, compare_runs, from_dict, to_dict
from bwd.errors import BwdError


def ask(args: argparse.Namespace) -> int:
    api = Api(args.url.rstrip("/"), os.environ.get("API_KEY"))
    model = args.model or str(api.get("/v1/models")["data"][0]["id"])

    def said(done: int) -> None:
        print(f"\r{done} of {args.prompts} answers", end="", file=sys.stderr, flush=True)

    answers = api_answers.ask(
        api,
        model,
        PROMPTS[: args.prompts],
        tokens=args.tokens,
        together=args.together,
        timeout=args.timeout,
        said=said,
    )
    print(file=sys.stderr)
    data = {
        "schema": 1,
        "model": model,
        "note": args.note,
        "tokens": args.tokens,
        "together": args.together,
        "answers": [to_dict(answer) for answer in answers],
    }
    Path(args.out).write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(answers)} answers of {args.tokens} tokens by {model}")
    return 0


def read(name: str) -> tuple[Answer, ...]:
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
        return tuple(from_dict(one) for one in data["answers"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BwdError(f"{name} is no file of answers: {error}", hint="make it with `ask --out`") from error


def judge(args: argparse.Namespace) -> int:
    """The last file, or each of --against, held to all the others: runs of one build."""
    runs = list(args.runs)
    others = args.against or [runs.pop()]
    if len(runs) < 2:
        raise BwdError(
            "one run does not say how far a build differs from itself", hint="give two runs or more"
        )
    own = [read(name) for name in runs]
    found = []
    for name in others:
        try:
            found.append((name, compare_runs(own, read(name), args.drift)))
        except ValueError as error:
            raise BwdError(f"{name}: {error}", hint="ask for all with the same --prompts") from error
    same = all(one.same for _, one in found)
    if args.json:
        told: list[dict[str, Any]] = [
            {"file": name, "same": one.same, "line": one.line(), **dataclasses.asdict(one)}
            for name, one in found
        ]
        print(json.dumps(told if args.against else told[0], indent=2))
        return 0 if same else 1
    noise = found[0][1].noise
    print(
        f"own run-to-run difference: at most {noise.largest:.5f} nats, mean {noise.mean:.5f}, over "
        f"{noise.places} places of {len(runs)} runs; {noise.parted} of the prompts part by themselves"
    )
    for name, one in found:
        show(name, one)
    print("the same text" if same else "NOT the same text")
    return 0 if same else 1


def show(name: str, found: Comparison) -> None:
    print(f"{name}:")
    for one in found.partings:
        gap = "not a likely token" if one.gap is None else f"{one.gap:.5f} nats less likely"
        allowed = "a tie" if one.allowed else "NOT a tie"
        print(
            f"  prompt {one.prompt + 1}, token {one.place + 1}: {one.theirs} for {one.ours}, {gap}: {allowed}"
        )
    print(f"  mean drift {found.drift:.5f} nats over {found.places} places")
    for text in found.wrong:
        print(f"  wrong: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    asking = verbs.add_parser("ask", help="ask an endpoint and write the answers")
    asking.add_argument("--url", default="http://127.0.0.1:8000")
    asking.add_argument("--model", help="default: the first that the endpoint lists")
    asking.add_argument("--out", required=True, metavar="FILE")
    asking.add_argument("--tokens", type=int, default=96, help="length of each answer (96)")
    asking.add_argument("--prompts", type=int, default=len(PROMPTS), help="the first so many (all 20)")
    asking.add_argument("--together", type=int, default=1, help="so many at once (1)")
    asking.add_argument("--timeout", type=float, default=300.0, help="seconds for one answer (300)")
    asking.add_argument("--note", default="", help="kept in the file: which build this is")
    judging = verbs.add_parser("compare", help="two runs or more of a build, and another one")
    judging.add_argument("runs", nargs="+", metavar="FILE", help="runs of the first build, and the other one")
    judging.add_argument(
        "--against", nargs="+", metavar="FILE", help="runs of the other build, then not last"
    )
    judging.add_argument("--drift", type=float, default=DRIFT_LIMIT, help=f"nats ({DRIFT_LIMIT})")
    judging.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        return ask(args) if args.verb == "ask" else judge(args)
    except BwdError as error:
        print(f"compare_answers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
