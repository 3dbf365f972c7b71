"""Compile FlashInfer's kernels into its cache, without a GPU.

Runs under the engine's Python, in the engine's environment: FlashInfer's build files hold the paths of
compiler and toolkit, and the engine uses what is there only when its own files come out the same.

Standard input: the kernels (bwd.core.kernels, as JSON). Standard output: one JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any


def main() -> int:
    wanted = json.load(sys.stdin)
    workers = max(1, int(os.environ.get("MAX_JOBS") or 1))
    try:
        specs = [(kernel, _spec(kernel)) for kernel in wanted]
    except Exception as error:  # whatever FlashInfer raises: the parent tells it in one line
        _say(error=f"{type(error).__name__}: {error}")
        return 1
    # Each module has a ninja of its own (FlashInfer looks for that one's log at a start), and few of them
    # have more files than there are processors: two at once keep the processors busy to the end.
    failed = 0
    with ThreadPoolExecutor(2 if workers > 1 else 1) as pool:
        started = time.monotonic()
        running = {pool.submit(spec.build, False, True): spec for _, spec in specs}
        for done, future in enumerate(as_completed(running), 1):
            spec = running[future]
            failure = future.exception()
            if failure is not None:
                failed += 1
                _say(name=spec.name, done=done, total=len(specs), error=str(failure)[-4000:])
            else:
                size = spec.jit_library_path.stat().st_size
                seconds = round(time.monotonic() - started, 1)
                path = str(spec.jit_library_path)
                _say(name=spec.name, done=done, total=len(specs), seconds=seconds, bytes=size, path=path)
    return 1 if failed else 0


def _spec(kernel: dict[str, Any]) -> Any:
    """The module as FlashInfer itself would generate it at a start (get_batch_prefill_module,
    get_xqa_module, get_sampling_module)."""
    import torch

    def dtype(name: str) -> Any:
        return getattr(torch, name)

    if kernel["kind"] == "sampling":
        from flashinfer.jit.sampling import gen_sampling_module  # type: ignore[import-not-found]

        return gen_sampling_module()
    size = kernel["head_size"]
    if kernel["kind"] == "xqa":
        from flashinfer.jit.xqa import gen_xqa_module  # type: ignore[import-not-found]

        return gen_xqa_module(
            dtype(kernel["dtype"]), dtype(kernel["kv_dtype"]), kernel["page_size"], size,
            kernel["ratio"], kernel["window"], dtype(kernel["dtype"]),
        )  # fmt: skip
    from flashinfer.jit.attention import modules  # type: ignore[import-not-found]

    generate: Callable[..., Any] = modules.gen_batch_prefill_module
    if kernel["backend"] == "fa2":
        generate = modules._gen_batch_prefill_primary_module
    return generate(
        kernel["backend"], dtype(kernel["q_dtype"]), dtype(kernel["kv_dtype"]), dtype(kernel["dtype"]),
        torch.int32, size, size, 0, kernel["window"], kernel["soft_cap"], False,
    )  # fmt: skip


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
