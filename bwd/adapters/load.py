"""Load on a running endpoint: vLLM's own load generator, as a child under the engine's Python.

One child serves several loads, because its imports take longer than a short load; each load has its time
limit, and the child that does not keep it is killed with its group.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from bwd.core import bench
from bwd.core.bench import Measured, ResultFormatError, Workload
from bwd.core.prompts import PROMPTS
from bwd.errors import BwdError

IMPORT_S = 300.0
"""Seconds that importing vLLM may take: 8 s on a warm disk, 25 s measured on a cold one (2x H200 VM)."""
_TICK = 0.5
_HOME = str(Path(__file__).resolve().parent.parent.parent)
_COUNT = re.compile(rb"(\d+)/(\d+) \[")
"""tqdm's "12/64 [00:03<00:11", on standard error with carriage returns."""

Progress = Callable[[int, int, float], None]
"""(requests done, requests in all, seconds since the load began)."""


class LoadError(BwdError):
    """No measurement came of a load: the generator failed, or did not end in time."""


class Load:
    """The load generator under `python`, started with `environ` (the engine's environment, its PYTHONPATH in
    it), reading its key for the endpoint from `key`. `log` gets what it prints. A context manager."""

    def __init__(
        self,
        python: Path | str,
        environ: Mapping[str, str],
        *,
        log: Path,
        key: str | None = None,
        command: Sequence[str] = ("-m", "bwd.children.load"),
    ) -> None:
        self._argv = [os.fspath(python), *command]
        self._environ = _environment(environ, key)
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the generator and wait for its imports; nothing when it runs. Raises LoadError."""
        if self._child is not None and self._child.poll() is None:
            return
        self.close()
        with open(self._log, "ab") as log:
            try:
                self._child = subprocess.Popen(
                    self._argv,
                    env=self._environ,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise LoadError(f"{self._argv[0]} cannot be started: {error.strerror or error}") from error
        self._rest = b""
        self._answer(IMPORT_S, "loading vLLM's load generator", None)

    def run(
        self,
        workload: Workload,
        *,
        endpoint: str,
        model: str,
        tokenizer: str,
        seed: int,
        timeout: float,
        on_progress: Progress | None = None,
    ) -> Measured:
        """Send one load and wait for its end, at most `timeout` seconds. `endpoint` is a base URL
        ("http://127.0.0.1:8000"), `model` the served name, `tokenizer` the model's folder, `seed` what the
        prompts are drawn from (the same seed sends the same prompts, which the prefix cache then answers).
        Raises LoadError; a request that fails is no error but counted in the measurement."""
        self.start()
        assert self._child is not None
        assert self._child.stdin is not None
        with tempfile.TemporaryDirectory(prefix="bwd-load-") as folder:
            if workload.text:
                (Path(folder) / bench.TEXT_FILE).write_text(json.dumps(bench.text_data(PROMPTS)))
            argv = bench.arguments(
                workload,
                endpoint=endpoint,
                model=model,
                tokenizer=tokenizer,
                seed=seed,
                result_dir=folder,
                result_name="result.json",
            )
            since = self._logged()  # before the order: its first count may be there at once
            try:
                self._child.stdin.write(json.dumps({"argv": argv}).encode() + b"\n")
                self._child.stdin.flush()
            except OSError as error:
                raise LoadError(f"the load generator is gone: {self._last_line()}") from error
            self._answer(timeout, f"the load {workload.name}", on_progress, since)
            return _read(Path(folder) / "result.json", workload)

    def close(self) -> None:
        """End the generator and whatever it started."""
        child, self._child = self._child, None
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(patience)
                return

    def _answer(
        self, timeout: float, what: str, on_progress: Progress | None, since: int = 0
    ) -> dict[str, Any]:
        """The next answer of the child; its progress is what the log says after `since` bytes. Raises
        LoadError with its error, when it ends, or when the time is over; then it is killed, and the next
        load starts another."""
        assert self._child is not None
        assert self._child.stdout is not None
        began = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                waited = time.monotonic() - began
                if waited > timeout:
                    self.close()
                    raise LoadError(f"{what} did not end within {timeout:.0f} s")
                if on_progress is not None and (count := self._progress(since)):
                    on_progress(*count, waited)
                if not selector.select(min(_TICK, max(0.0, timeout - waited) + 0.01)):
                    continue
                block = os.read(self._child.stdout.fileno(), 65536)
                if not block:
                    self.close()
                    raise LoadError(f"the load generator ended: {self._last_line()}")
                self._rest += block
        line, _, self._rest = self._rest.partition(b"\n")
        answer = json.loads(line)
        if on_progress is not None and (count := self._progress(since)):
            on_progress(*count, time.monotonic() - began)  # a short load ends between two looks
        if answer.get("event") == "error":
            raise LoadError(f"{what}: {answer.get('message')}")
        return dict(answer)

    def _logged(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def _progress(self, since: int) -> tuple[int, int] | None:
        with contextlib.suppress(OSError), open(self._log, "rb") as log:
            log.seek(max(since, log.seek(0, os.SEEK_END) - 2048))
            found = _COUNT.findall(log.read())
            if found:
                return int(found[-1][0]), int(found[-1][1])
        return None

    def _last_line(self) -> str:
        with contextlib.suppress(OSError), open(self._log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines()]
            return next((line for line in reversed(lines) if line), "it said nothing")[:300]
        return "its output cannot be read"


def run_workload(
    python: Path | str,
    environ: Mapping[str, str],
    workload: Workload,
    *,
    endpoint: str,
    model: str,
    tokenizer: str,
    seed: int,
    log: Path,
    timeout: float,
    key: str | None = None,
    on_progress: Progress | None = None,
) -> Measured:
    """One load with a generator of its own: see Load. Raises LoadError."""
    with Load(python, environ, log=log, key=key) as load:
        return load.run(
            workload,
            endpoint=endpoint,
            model=model,
            tokenizer=tokenizer,
            seed=seed,
            timeout=timeout,
            on_progress=on_progress,
        )


def _read(path: Path, workload: Workload) -> Measured:
    try:
        return bench.parse(json.loads(path.read_bytes()), workload)
    except (OSError, ValueError, ResultFormatError) as error:
        raise LoadError(f"the result of {workload.name} cannot be read: {error}") from error


def _environment(environ: Mapping[str, str], key: str | None) -> dict[str, str]:
    # BWD_RUN_ID marks the engine's own processes, which bwd may end: the generator is none of them.
    env = {name: value for name, value in environ.items() if name not in ("BWD_RUN_ID", "OPENAI_API_KEY")}
    path = [env.get("PYTHONPATH", ""), _HOME]
    env["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    env.update(NO_COLOR="1", PYTHONUNBUFFERED="1")
    # The generator's HTTP client believes http_proxy, for 127.0.0.1 too
    for name in [name for name in env if name.lower() in ("http_proxy", "all_proxy")]:
        del env[name]
    if key is not None:
        env["OPENAI_API_KEY"] = key
    return env


def base_url(endpoint: str) -> str:
    """The endpoint without a path: what the generator appends /v1/completions to."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme or 'http'}://{parts.netloc}"
