"""Run under the engine's Python by test_demo_model.py: compare variants of the demo model.

engine_compare.py heads UNPADDED PADDED     largest difference of logits, float32, as JSON
engine_compare.py awq PADDED AWQ            relative error of each dequantised weight, as JSON
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file

from bwd.children import demo

PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ",
)


def logits(folder: str) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in PROMPTS]


def heads(unpadded: str, padded: str) -> dict[str, float]:
    pairs = list(zip(logits(unpadded), logits(padded), strict=True))
    return {
        "largest_difference": max((a - b).abs().max().item() for a, b in pairs),
        "largest_logit": max(a.abs().max().item() for a, _ in pairs),
        "same_choices": float(all(bool((a.argmax(-1) == b.argmax(-1)).all()) for a, b in pairs)),
    }


def awq(padded: str, quantised: str) -> dict[str, float]:
    whole, packed = (load_file(f"{folder}/model.safetensors") for folder in (padded, quantised))
    errors, zeros_kept = [], True
    for name, w in whole.items():
        base = name.removesuffix("weight")
        if base + "qweight" not in packed:
            continue
        again = demo.dequantise(*(packed[base + part] for part in ("qweight", "qzeros", "scales")))
        errors.append(((again - w.float()).norm() / w.float().norm()).item())
        for axis in (0, 1):
            empty = (w == 0).all(1 - axis)
            added = again[empty] if axis == 0 else again[:, empty]
            zeros_kept &= bool((added == 0).all())
    return {
        "linears": float(len(errors)),
        "worst": max(errors),
        "mean": sum(errors) / len(errors),
        "zeros_kept": float(zeros_kept),
    }


if __name__ == "__main__":
    print(json.dumps({"heads": heads, "awq": awq}[sys.argv[1]](*sys.argv[2:])))
