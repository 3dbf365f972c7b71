"""A fake of bwd.children.load: speaks its protocol and sends real requests to the endpoint, a few short
ones, so that an engine that is slow, hung or gone shows. What it writes has the form of `vllm bench serve`.

    python load.py          orders on standard input, answers on standard output
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TOKENS = 5


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def one(base: str, model: str) -> float | None:
    """Seconds that one completion took, None when it failed."""
    parts = urlsplit(base)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=30)
    body = {"model": model, "prompt": "x", "max_tokens": TOKENS}
    began = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return time.monotonic() - began if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def load(argv: list[str]) -> None:
    base, model = option(argv, "--base-url"), option(argv, "--model")
    streams, prompts = int(option(argv, "--max-concurrency")), int(option(argv, "--num-prompts"))
    began = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        took = list(pool.map(lambda _: one(base, model), range(prompts)))
    seconds = time.monotonic() - began
    good = [one for one in took if one is not None]
    step = 1000 * sum(good) / max(1, len(good)) / TOKENS
    tokens = len(good) * TOKENS
    result: dict[str, Any] = {
        "duration": seconds, "completed": len(good), "failed": prompts - len(good),
        "total_input_tokens": len(good), "total_output_tokens": tokens,
        "request_throughput": len(good) / seconds, "output_throughput": tokens / seconds,
        "total_token_throughput": tokens / seconds, "errors": [],
    }  # fmt: skip
    for name in ("ttft", "itl", "tpot", "e2el"):
        result |= {f"{which}_{name}_ms": step for which in ("mean", "p50", "p90", "p95", "p99")}
    path = Path(option(argv, "--result-dir")) / option(argv, "--result-filename")
    path.write_text(json.dumps(result))


def main() -> int:
    print(json.dumps({"event": "ready"}), flush=True)
    for line in sys.stdin:
        load(json.loads(line)["argv"])
        print(json.dumps({"event": "done"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
