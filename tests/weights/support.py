"""What the tests of the weights share: a model to serve, the fake Hub as a process, a place to fetch to."""

from __future__ import annotations

import asyncio
import json
import os
import random
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bwd import paths as bwd_paths
from bwd.adapters import weights
from bwd.core.secret import Secret
from bwd.core.settings import Settings
from bwd.paths import Paths

ROOT = Path(__file__).resolve().parents[2]
REPO = "acme/tiny-awq"
# The stall is long: a child on a busy machine may need seconds for its imports. Tests of stalls bring others.
QUICK = weights.Patience(stall=30.0, read=1.0, pace=0.02)


def safetensors(path: Path, tensors: Mapping[str, int], seed: int) -> None:
    """A safetensors file of bytes out of `seed`; `tensors` maps names to bytes."""
    table, at = {}, 0
    for name, size in tensors.items():
        table[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    source = random.Random(seed)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            out.write(source.randbytes(min(at, 1 << 20)))
            at -= min(at, 1 << 20)


def make_model(folder: Path, shards: int = 2, shard_bytes: int = 2 << 20) -> Path:
    """A repository as the Hub has them: shards with an index, config, tokenizer, and files nobody needs."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        safetensors(folder / name, {f"layer.{number}.qweight": shard_bytes}, number)
        weight_map[f"layer.{number}.qweight"] = name
    index = {"metadata": {"total_size": shards * shard_bytes}, "weight_map": weight_map}
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "quantization_config": {"quant_method": "awq", "bits": 4},
    }
    for name, text in {
        "model.safetensors.index.json": json.dumps(index),
        "config.json": json.dumps(config),
        "tokenizer.json": json.dumps({"model": {"vocab": {}}}),
        "README.md": "read me",
        "pytorch_model.bin": "an older form of the weights",
    }.items():
        (folder / name).write_text(text)
    return folder


@dataclass(slots=True)
class FakeHub:
    """The fake Hub, running."""

    folder: Path
    log: Path
    process: subprocess.Popen[bytes]
    api: int
    cdn: int
    commit: str
    scheme: str = "http"
    scripts: int = 0

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.api}"

    def script(self, *faults: Mapping[str, Any], **more: Any) -> None:
        body = json.dumps({"faults": list(faults), **more}).encode()
        request = urllib.request.Request(f"{self.endpoint}/_faults", body, method="POST")
        urllib.request.urlopen(request).close()
        self.scripts += 1
        self.log.write_text("")

    def requests(self) -> list[dict[str, Any]]:
        """Those of the present script. An answer to somebody who was killed in the test before may end, and
        be noted, only now."""
        noted = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [request for request in noted if request.get("script", self.scripts) == self.scripts]

    def sent(self, name: str = "") -> int:
        """Bytes of weight files that left the server."""
        return sum(r["sent"] for r in self.requests() if r["host"] == "cdn" and name in r["path"])

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def start_hub(folder: Path, log: Path, certificate: Path | None = None) -> FakeHub:
    log.write_text("")
    program = str(ROOT / "tests" / "fakes" / "hub.py")
    process = subprocess.Popen(
        [sys.executable, program, str(folder), REPO, str(log), *([str(certificate)] if certificate else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    ports = json.loads(process.stdout.readline())
    scheme = "https" if certificate else "http"
    return FakeHub(folder, log, process, ports["api"], ports["cdn"], ports["commit"], scheme)


@dataclass(slots=True)
class Place:
    """One installation that fetches from the fake Hub."""

    hub: FakeHub
    paths: Paths
    environ: dict[str, str]
    seen: list[weights.Progress] = field(default_factory=list)

    def settings(self, **changes: Any) -> Settings:
        token = changes.pop("token", None)
        return Settings(
            model=changes.pop("model", REPO),
            hf_endpoint=changes.pop("hf_endpoint", self.hub.endpoint),
            hf_token=Secret(token) if token is not None else None,
            hf_home=str(self.paths.state / "hf-home"),
            **changes,
        )

    def fetch(self, patience: weights.Patience = QUICK, **changes: Any) -> weights.ModelFolder:
        return asyncio.run(self.prepare(patience, **changes))

    async def prepare(self, patience: weights.Patience = QUICK, **changes: Any) -> weights.ModelFolder:
        return await weights.prepare(
            self.settings(**changes),
            self.paths,
            "",
            self.seen.append,
            patience=patience,
            environ=self.environ,
        )

    @property
    def store(self) -> Path:
        return self.paths.models / "hub" / REPO.replace("/", "--")

    def notes(self) -> str:
        return "\n".join(dict.fromkeys(p.note for p in self.seen))


def place(hub: FakeHub, state: Path) -> Place:
    paths = bwd_paths.find({"BWD_HOME": str(ROOT), "BWD_STATE_DIR": str(state)})
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    return Place(hub, paths, kept)


def same_files(folder: Path, source: Path) -> bool:
    """Every weight file in `folder` is the one in `source`, and nothing half is left."""
    names = [p.name for p in source.glob("*.safetensors")]
    return all((folder / n).read_bytes() == (source / n).read_bytes() for n in names) and not list(
        folder.rglob("*.partial")
    )
