"""How fast memory is copied: on each visible GPU inside its own memory, or in the host's with --host.

    ENGINE_PYTHON -m bwd.children.copy_bandwidth [--host]

A line of JSON for each memory on standard output: {"where": "GPU 0", "bytes_per_s": N, "how": "..."} or
{"where": "GPU 0", "why": "..."} where it could not be measured. Read and write are counted, so a copy of N
bytes counts 2 N. It takes a quarter of what is free at most: an engine that serves keeps its room.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

_MOST = 1 << 30
_LEAST = 64 << 20
_HOST = 512 << 20
"""Bytes of the host's copy: more than the caches of the processors at hand."""
_COPIES, _ROUNDS = 10, 3


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> int:
    import torch

    if "--host" in sys.argv[1:]:
        _host(torch)
        return 0
    if not torch.cuda.is_available():
        _say(where="GPUs", why="torch sees no GPU")
        return 1
    for index in range(torch.cuda.device_count()):
        try:
            _card(torch, index)
        except RuntimeError as error:  # out of memory is one of them
            _say(where=f"GPU {index}", why=str(error).splitlines()[0])
    return 0


def _card(torch: Any, index: int) -> None:
    cuda = torch.cuda
    cuda.set_device(index)
    free, _ = cuda.mem_get_info(index)
    size = min(_MOST, free // 8)
    if size < _LEAST:
        _say(where=f"GPU {index}", why=f"only {free >> 20} MiB free beside the engine")
        return
    source = torch.ones(size, dtype=torch.uint8, device=f"cuda:{index}")
    target = torch.empty_like(source)
    best = 0.0
    target.copy_(source)
    for _ in range(_ROUNDS):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(_COPIES):
            target.copy_(source)
        end.record()
        cuda.synchronize(index)
        best = max(best, 2 * size * _COPIES / (begin.elapsed_time(end) / 1000))
    _say(
        where=f"GPU {index}", bytes_per_s=best, how=f"{_COPIES} copies of {size >> 20} MiB, best of {_ROUNDS}"
    )


def _host(torch: Any) -> None:
    source = torch.ones(_HOST, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    best = 0.0
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * _HOST / (time.perf_counter() - began))
    threads = torch.get_num_threads()
    how = f"copy of {_HOST >> 20} MiB of host memory, {threads} threads, best of {_ROUNDS}"
    _say(where="host", bytes_per_s=best, how=how)


if __name__ == "__main__":
    sys.exit(main())
