"""Where a decoding step of the running engine spends its time, by torch's profiler in vLLM.

    python scripts/profile_decode.py --out DIR              # the engine that bwd serves now
    python scripts/profile_decode.py --read TRACE ...       # tables of traces that are there

The engine has to be started with a profiler: a line of .env for that,

    EXTRA_VLLM_ARGS='--profiler-config.profiler=torch --profiler-config.torch_profiler_dir=/DIR/traces ...'

(`--lines DIR` prints it whole). One stream is begun, the profiler is started when it decodes and ended after
some steps; then each rank writes its trace. The profiler slows the host down, hardly the card: what counts
are the shares. `--streams N` holds N streams.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bwd import paths as bwd_paths  # noqa: E402
from bwd.adapters import bwd_client  # noqa: E402
from bwd.core import decode_profile  # noqa: E402
from bwd.core.decode_profile import TraceError  # noqa: E402
from bwd.errors import BwdError  # noqa: E402

_PROMPT = "Once upon a time, in a village by the sea, there lived a fisherman who"
_MORE = 400
"""Tokens a stream has left when the profiler begins: the steps, and what passes while it starts."""


class Engine:
    """The engine itself, behind front: by its unix socket, or "HOST:PORT"."""

    def __init__(self, where: str, model: str) -> None:
        self.where, self.model = where, model

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        if "/" in self.where:
            return bwd_client.UnixConnection(Path(self.where), timeout)
        return http.client.HTTPConnection(self.where, timeout=timeout)

    def post(self, target: str, body: dict[str, Any], timeout: float) -> None:
        """Raises BwdError when the engine says no, or nothing in time."""
        connection = self.connect(timeout)
        try:
            connection.request("POST", target, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read(2000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise BwdError(f"{target}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if answer.status == 404:
            raise BwdError(f"{target} is not there", hint="start the engine with a profiler (--lines DIR)")
        if answer.status >= 400:
            raise BwdError(f"{target}: {answer.status} {text[:300]}")

    def stream(self, number: int, tokens: int, seen: threading.Semaphore, end: threading.Event) -> None:
        """One completion; releases `seen` once for every piece. Ends early when `end` is set."""
        connection = self.connect(120)
        body = {
            "model": self.model, "prompt": f"{number}. {_PROMPT}", "max_tokens": tokens, "min_tokens": tokens,
            "ignore_eos": True, "temperature": 0, "stream": True,
        }  # fmt: skip
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            while not end.is_set() and (line := answer.readline()):
                if line.startswith(b"data: {"):
                    seen.release()
        except (OSError, http.client.HTTPException) as error:
            print(f"stream {number}: {error or type(error).__name__}", file=sys.stderr)
        finally:
            connection.close()


def trace(engine: Engine, streams: int, steps: int, seconds: float) -> None:
    """Have some steps of decoding traced. Raises BwdError."""
    seen, end = threading.Semaphore(0), threading.Event()
    threads = [
        threading.Thread(target=engine.stream, args=(number, steps + _MORE, seen, end), daemon=True)
        for number in range(streams)
    ]
    for one in threads:
        one.start()
    try:
        _wait(seen, streams * 16, seconds)
        engine.post("/start_profile", {}, seconds)
        while seen.acquire(blocking=False):
            pass
        _wait(seen, streams * steps, seconds)
    finally:
        # the streams go on while the profiler is ended: a batch that gets smaller is other steps
        try:
            engine.post("/stop_profile", {}, seconds)
        finally:
            end.set()
            for one in threads:
                one.join(10)


def _wait(seen: threading.Semaphore, pieces: int, seconds: float) -> None:
    limit = time.monotonic() + seconds
    for _ in range(pieces):
        if not seen.acquire(timeout=max(0.01, limit - time.monotonic())):
            raise BwdError(f"the engine did not decode {pieces} tokens within {seconds:.0f} s")


def events_of(file: Path) -> list[dict[str, Any]]:
    """The events of a trace, compressed or not. Raises BwdError."""
    try:
        raw = file.read_bytes()
        data = json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)
    except (OSError, ValueError, EOFError) as error:
        raise BwdError(f"{file} cannot be read: {error}") from error
    found = data.get("traceEvents") if isinstance(data, dict) else data
    return found if isinstance(found, list) else []


def lines_for(folder: Path) -> str:
    """The line of .env for an engine that writes its traces into `folder`."""
    flags = (
        "--profiler-config.profiler=torch", f"--profiler-config.torch_profiler_dir={folder}",
        "--profiler-config.torch_profiler_with_stack=false",
        "--profiler-config.torch_profiler_dump_cuda_time_total=false",
        "--profiler-config.ignore_frontend=true",
    )  # fmt: skip
    return f"EXTRA_VLLM_ARGS='{' '.join(flags)}'"


def _traces(folder: str) -> set[Path]:
    return {one for pattern in ("*.json", "*.json.gz") for one in Path(folder).rglob(pattern)}


def _running() -> tuple[Engine, str]:
    """The engine that bwd serves, and the folder of its traces. Raises BwdError."""
    plan = bwd_client.get(bwd_paths.find(os.environ).bwd_socket, "/plan")
    name = "--profiler-config.torch_profiler_dir="
    found = [str(word).removeprefix(name) for word in plan.get("argv") or () if str(word).startswith(name)]
    if not found:
        raise BwdError("the engine runs without a profiler", hint="`--lines DIR` prints the line for .env")
    return Engine(str(plan["uds"]), str(plan["served_model_name"])), found[-1]


def report(files: Sequence[Path]) -> tuple[str, list[dict[str, Any]], bool]:
    """The tables of all traces, the same as data, and whether there was one at least."""
    out, data = ["# Where a step of decoding spends its time"], []
    for file in files:
        try:
            steps = decode_profile.read(events_of(file))
        except (TraceError, BwdError) as error:
            out += ["", f"{file.name}: {error}."]
            continue
        out += ["", *decode_profile.table(steps, file.name)]
        data.append({"trace": file.name, **steps.to_dict()})
    return "\n".join(out) + "\n", data, bool(data)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", metavar="DIR", help="where decode_profile.md and .json go")
    parser.add_argument("--read", nargs="+", metavar="TRACE", help="traces that are there")
    parser.add_argument("--lines", metavar="DIR", help="print the line of .env for an engine with a profiler")
    parser.add_argument("--steps", type=int, default=40, help="of decoding that are traced (40)")
    parser.add_argument("--streams", type=int, default=1, help="at once (1)")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="for each thing the engine is asked (120)"
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="an engine that bwd does not serve")
    parser.add_argument("--model", default="", help="its served name")
    parser.add_argument("--traces", metavar="DIR", help="the folder of its traces")
    args = parser.parse_args(argv)
    if args.lines:
        print(lines_for(Path(args.lines).absolute()))
        return 0
    try:
        if args.read:
            files = [Path(one) for one in args.read]
        else:
            if args.address and not args.traces:
                parser.error("--address needs --traces")
            engine, folder = (Engine(args.address, args.model), args.traces) if args.address else _running()
            before = _traces(folder)
            trace(engine, args.streams, args.steps, args.seconds)
            files = sorted(_traces(folder) - before)
            if not files:
                raise BwdError(f"the engine wrote no trace into {folder}")
    except BwdError as error:
        print(f"profile_decode: {error}", file=sys.stderr)
        return 1
    text, data, good = report(files)
    if args.out:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "decode_profile.md").write_text(text, encoding="utf-8")
        (out / "decode_profile.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
