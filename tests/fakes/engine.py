"""A fake vLLM: a program that plays a script. It reads vLLM's flags as bwd passes them, prints lines in
vLLM's shapes, and answers over the unix socket like the API server of vLLM 0.32.0.

    python engine.py [-m MODULE] --uds PATH --served-model-name NAME ...

The script is a JSON file named by FAKE_ENGINE_SCRIPT (default: a healthy engine), or the part of it for
this run: {"runs": [script of the first start, of the second, ...]}; the last stays in force. Keys:

  start       list of steps before serving (see below); default: HEALTHY
  serve       false: never listen
  after       list of steps once it serves
  tokens      tokens of a completion when the request names no max_tokens; 5
  delay       seconds a token takes; 0.01
  hang        true: requests never end, counters stand still (also set while the file named
              by FAKE_ENGINE_HANG exists)
  dead        true: /health answers 503
  metrics     "html" | "none" | "endless": a broken /metrics
  ignore_term true: SIGTERM does nothing
  exit        exit code on SIGTERM; 0
  model       the id that /v1/models lists instead of --served-model-name
  says        "other" | "garbage": what a completion with logprobs says instead of the usual

A step is {"log": TEXT} (a line of the API server), {"raw": TEXT} (as it stands), {"sleep": SECONDS},
{"exit": CODE}, {"grandchild": SECONDS} (a child that leaves the session and sleeps),
{"child": SECONDS} (a child in the session), {"worker": NAME} (a child that vLLM would call VLLM::NAME),
{"silent": true} (wait for ever),
{"flood": LINES}, {"kill": "self"}, {"shm": NAME} (a name in /dev/shm, mapped and never unlinked).
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

HEALTHY = [
    {"log": "INFO", "at": "utils.py:286", "text": "non-default args: {'model': 'f', 'api_key': ['sk-shh']}"},
    {"log": "INFO", "at": "model.py:733", "text": "Resolved architecture: LlamaForCausalLM"},
    {"log": "INFO", "at": "core.py:133", "proc": "EngineCore",
     "text": "Initializing a V1 LLM engine (v0.32.0) with config: model='fake'"},
    {"log": "INFO", "at": "parallel_state.py:1906", "proc": "EngineCore",
     "text": "world_size=1 rank=0 local_rank=0 distributed_init_method=tcp://127.0.0.1:1 backend=gloo"},
    {
        "log": "INFO",
        "at": "cpu_model_runner.py:68",
        "proc": "EngineCore",
        "text": "Starting to load model fake...",
    },
    {"raw": "\rLoading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  9.00it/s]\n"},
    {
        "log": "INFO",
        "at": "default_loader.py:501",
        "proc": "EngineCore",
        "text": "Loading weights took 0.10 seconds",
    },
    {"log": "INFO", "at": "cpu_worker.py:260", "proc": "EngineCore",
     "text": "Explicitly set (0.06/20.00) GiB for KV cache"},
    {"log": "INFO", "at": "kv_cache_utils.py:2327", "proc": "EngineCore",
     "text": "CPU KV cache size: 2,816 tokens, Maximum concurrency for 512 tokens per request: 5.50x"},
    {"log": "INFO", "at": "core.py:402", "proc": "EngineCore",
     "text": "init engine (profile, create kv cache, warmup model) took 0.40 s (compilation: 0.00 s)"},
    {"log": "INFO", "at": "entry.py:140", "text": "Starting vLLM server on unix socket"},
]  # fmt: skip


def flag(name: str, default: str = "") -> str:
    for index, word in enumerate(sys.argv):
        if word == name and index + 1 < len(sys.argv):
            return sys.argv[index + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return default


def script() -> dict[str, Any]:
    name = os.environ.get("FAKE_ENGINE_SCRIPT")
    if not name or not Path(name).exists():
        return {}
    whole = json.loads(Path(name).read_text())
    if "runs" not in whole:
        return dict(whole)
    counter = Path(name + ".count")
    number = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(number + 1))
    return dict(whole["runs"][min(number, len(whole["runs"]) - 1)])


def line(step: dict[str, Any]) -> str:
    stamp = time.strftime("%m-%d %H:%M:%S")
    proc = step.get("proc", "APIServer")
    return (
        f"({proc} pid={os.getpid()}) {step['log']} {stamp} [{step.get('at', 'fake.py:1')}] {step['text']}\n"
    )


def _share(name: str) -> mmap.mmap:
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


class Engine:
    def __init__(self, play: dict[str, Any]) -> None:
        self.play = play
        self.running = 0
        self.waiting = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = 0
        self.model = play.get("model") or flag("--served-model-name", "fake")
        self.dead = bool(play.get("dead"))
        self.mapped: list[mmap.mmap] = []
        # vLLM's gauges are written by the scheduler's step: in a hang they stand still too
        self.frozen: tuple[int, int] | None = None

    def hangs(self) -> bool:
        name = os.environ.get("FAKE_ENGINE_HANG")
        return bool(self.play.get("hang")) or bool(name and os.path.exists(name))

    async def steps(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            if "log" in step:
                sys.stdout.write(line(step))
                sys.stdout.flush()
            elif "raw" in step:
                sys.stderr.write(step["raw"])
                sys.stderr.flush()
            elif "sleep" in step:
                await asyncio.sleep(step["sleep"])
            elif "exit" in step:
                sys.stdout.flush()
                os._exit(step["exit"])
            elif "grandchild" in step:
                subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        f"import time; time.sleep({step['grandchild']})",
                    ],
                    start_new_session=True,
                )
            elif "child" in step:
                subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({step['child']})"])
            elif "worker" in step:
                subprocess.Popen([f"VLLM::{step['worker']}", "600"], executable="/bin/sleep")
            elif "silent" in step:
                await asyncio.Event().wait()
            elif "flood" in step:
                text = line({"log": "INFO", "text": "flood " + "x" * 200})
                for _ in range(step["flood"]):
                    sys.stdout.write(text)
                sys.stdout.flush()
            elif "shm" in step:
                self.mapped.append(_share(step["shm"]))
            elif "kill" in step:
                os.kill(os.getpid(), signal.SIGKILL)
            elif "dead" in step:
                self.dead = True

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        kind = self.play.get("metrics")
        if kind == "html":
            return web.Response(text="<html><body>not found</body></html>", content_type="text/html")
        if kind == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"# more\n" * 1000)
                await asyncio.sleep(0.01)
        if self.hangs():
            self.frozen = self.frozen or (self.running, self.waiting)
        else:
            self.frozen = None
        running, waiting = self.frozen or (self.running, self.waiting)
        labels = f'{{engine="0",model_name="{self.model}"}}'
        values = {
            "vllm:num_requests_running": running,
            "vllm:num_requests_waiting": waiting,
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": self.generation_tokens,
            "vllm:kv_cache_usage_perc": 0.0,
        }
        if kind == "none":
            values = {"python_info": 1}
        text = "".join(f"{name}{labels} {float(value)}\n" for name, value in values.items())
        finished = (
            f'vllm:request_success_total{{engine="0",finished_reason="length"}} {float(self.finished)}\n'
        )
        return web.Response(text=text + (finished if kind != "none" else ""))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("model") not in (self.model, None):
            return web.json_response(
                {"error": {"message": f"The model `{body['model']}` does not exist."}},
                status=404,
            )
        chat = request.path.endswith("chat/completions")
        count = int(body.get("max_tokens") or self.play.get("tokens", 5))
        self.running += 1
        try:
            while self.hangs():
                await asyncio.sleep(0.05)
            self.prompt_tokens += 3
            if not body.get("stream"):
                for _ in range(0 if body.get("logprobs") else count):
                    await self.token()
                text = "Paris " * count
                choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
                if body.get("logprobs"):
                    choice = self.likely(body["prompt"], count)
                return web.json_response(
                    {
                        "id": "x",
                        "model": self.model,
                        "choices": [{"index": 0, **choice, "finish_reason": "length"}],
                        "usage": {"prompt_tokens": 3, "completion_tokens": count},
                    }
                )
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(count):
                await self.token()
                piece = {"delta": {"content": "Paris "}} if chat else {"text": "Paris "}
                await response.write(f"data: {json.dumps({'choices': [{'index': 0, **piece}]})}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.running -= 1
            self.finished += 1

    def likely(self, prompt: str, count: int) -> dict[str, Any]:
        """A choice of /v1/completions with logprobs: the same for the same prompt, every time."""
        shift = 500 if self.play.get("says") == "other" else 0
        first = [sum(prompt.encode()) % 400 + place + shift for place in range(count)]
        top = [{f"token_id:{one}": -0.2, f"token_id:{one + 1}": -2.0} for one in first]
        text = "!" * count if self.play.get("says") == "garbage" else f" is what {len(prompt)} letters say"
        tokens = [f"token_id:{one}" for one in first]
        return {"text": text, "logprobs": {"tokens": tokens, "top_logprobs": top}}

    async def token(self) -> None:
        await asyncio.sleep(self.play.get("delay", 0.01))
        while self.hangs():
            await asyncio.sleep(0.05)
        self.generation_tokens += 1


async def main() -> int:
    play = script()
    engine = Engine(play)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if play.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    await engine.steps(play.get("start", HEALTHY))
    if play.get("serve") is not False:
        app = web.Application()
        app.router.add_get("/health", engine.health)
        app.router.add_get("/v1/models", engine.models)
        app.router.add_get("/version", engine.version)
        app.router.add_get("/metrics", engine.metrics)
        app.router.add_post("/v1/completions", engine.complete)
        app.router.add_post("/v1/chat/completions", engine.complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        uds = flag("--uds")
        if os.path.exists(uds):  # vLLM binds; aiohttp would take the name over
            sys.stderr.write("OSError: [Errno 98] Address already in use\n")
            return 1
        await web.UnixSite(runner, uds).start()
        sys.stderr.write("INFO:     Started server process\nINFO:     Application startup complete.\n")
        sys.stderr.flush()
        after = asyncio.create_task(engine.steps(play.get("after", [])))
        await stop.wait()
        after.cancel()
        await runner.cleanup()
    else:
        await stop.wait()
    return int(play.get("exit", 0))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
