"""The torch engine on CPU against transformers' generate and its continuous batching, in one run.

Makes a 125M Llama-like model with random weights (bf16, 12 layers of 768, vocabulary 32,000) in a temporary
folder. For each batch size the engine's decode steps are interleaved with `generate`'s own, step by step,
inside one `generate` call, so that both see the same machine; ratios are of medians (and of minima beside
them). Continuous batching can't be interleaved: it runs before and after, the better run counts.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/engine_cpu.py
    python benchmarks/engine_cpu.py --quick --threads 1

The table comes first; the last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads of neighbors cost steps

import numpy as np
import torch

from bireme.config import EngineConfig, KvCacheConfig, Limits
from bireme.engines.base import EngineContext
from bireme.engines.child.validate import Gate
from bireme.engines.torch.loading import LoadedEngine
from bireme.messages import EngineRequest, SamplingParams
from bireme.metrics import Registry

TARGETS = {1: 0.95, 8: 1.2, 32: 1.5}
PAGE = 32
PREFILLS = 4


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        make_model(folder, options.dtype)
        rows = [measure(folder, batch, options) for batch in options.batch]
    print_table(rows, options)
    print(json.dumps({"benchmark": "engine_cpu", "machine": machine(), "options": vars(options), "rows": rows}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens a request")
    parser.add_argument("--steps", type=int, default=48, help="decode steps measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="12 steps, and no continuous batching")
    options = parser.parse_args()
    if options.quick:
        options.steps = min(options.steps, 12)
    return options


def make_model(folder: str, dtype: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)


def measure(folder: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one batch size."""
    model = load(folder)
    prompts = np.random.default_rng(batch).integers(10, 32000, (batch, options.prompt))
    continuous = [] if options.quick else [continuous_batching(model, prompts, options.steps)]
    ours, theirs, prefill = interleave(folder, model, prompts, options)
    if not options.quick:
        continuous.append(continuous_batching(model, prompts, options.steps))
    row: dict[str, Any] = {
        "batch": batch,
        "engine_ms": round(1e3 * statistics.median(ours), 2),
        "generate_ms": round(1e3 * statistics.median(theirs), 2),
        "ratio": round(statistics.median(theirs) / statistics.median(ours), 3),
        "ratio_of_minima": round(min(theirs) / min(ours), 3),
        "target": TARGETS.get(batch),
        "prefill_ratio": round(prefill[1] / prefill[0], 3),
    }
    if continuous:
        row["continuous_ms"] = round(1e3 * min(continuous), 2)
        row["continuous_ratio"] = round(min(continuous) / statistics.median(ours), 3)
    return row


def load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def engine(folder: str, batch: int, options: argparse.Namespace) -> LoadedEngine:
    """Return a core that this program steps itself, without the engine's thread."""
    length = options.prompt + options.steps + 16
    config = EngineConfig(
        max_batch_size=batch,
        max_num_tokens=max(2048, batch * options.prompt),
        max_seq_len=length,
        kv_cache_config=KvCacheConfig(tokens_per_block=PAGE, max_tokens=batch * (length + PAGE)),
    )
    context = EngineContext("bench", "decode", folder, config, Registry("bench"), num_threads=options.threads)
    return LoadedEngine(context, lambda action: action())


class Interleaver:
    """A stopping criterion that lets the engine do a step after each of generate's, and takes both times."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._core = loaded.core
        self._resumed_at = 0.0
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        began = time.perf_counter()
        if self._resumed_at:
            self.theirs.append(began - self._resumed_at)
        self._core.step()
        self._core.take_outputs()
        self._resumed_at = time.perf_counter()
        self.ours.append(self._resumed_at - began)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def interleave(
    folder: str, model: Any, prompts: Any, options: argparse.Namespace
) -> tuple[list[float], list[float], tuple[float, float]]:
    """Return step times of the engine and of generate, and both prefill times."""
    loaded = engine(folder, len(prompts), options)
    prefill = prefill_times(loaded, model, prompts, options)
    taken = Interleaver(loaded)
    ids = torch.from_numpy(prompts)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.steps + 2,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[taken],
        )
    # The first of each is a warm-up: generate's is its prefill, ours comes right after it.
    return taken.ours[2:], taken.theirs[1:], prefill


def prefill_times(loaded: LoadedEngine, model: Any, prompts: Any, options: argparse.Namespace) -> tuple[float, float]:
    """Return the least times of the engine and of transformers; the engine's last prefill stays for decode."""
    ours, theirs = [], []
    for attempt in range(PREFILLS):
        began = time.perf_counter()
        with torch.inference_mode():
            model(torch.from_numpy(prompts), use_cache=True, logits_to_keep=1)
        middle = time.perf_counter()
        submit(loaded, prompts + attempt, options.steps + 8, attempt)  # other prompts: nothing is reused
        loaded.core.step()
        theirs.append(middle - began)
        ours.append(time.perf_counter() - middle)
        if attempt < PREFILLS - 1:
            for number in range(len(prompts)):
                loaded.core.abort((attempt, number + 1))
    return min(ours), min(theirs)


def submit(loaded: LoadedEngine, prompts: Any, max_tokens: int, attempt: int) -> None:
    gate = Gate("decode", loaded.capacity, Limits(), b"")
    for number, prompt in enumerate(prompts):
        request = EngineRequest(
            prompt=(prompt % 32000).astype("<i4").tobytes(),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        loaded.core.add(loaded.admission.admit((attempt, number + 1), gate.admit(request)))


def continuous_batching(model: Any, prompts: Any, steps: int) -> float:
    """Return seconds a decode step of transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    batch, length = prompts.shape
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    page = {"page_size" if "page_size" in names else "block_size": PAGE}  # renamed within the releases that we take
    outputs = model.generate_batch(
        prompts.tolist(),
        generation_config=GenerationConfig(max_new_tokens=steps + 1, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            **page,
            num_blocks=max(64, batch * ((length + steps) // PAGE + 2)),
            max_batch_tokens=max(512, batch * length),
            max_requests_per_batch=batch,
        ),
        record_timestamps=True,
        progress_bar=False,
    )
    stamps = [output.timestamps for output in outputs.values()]
    model.set_attn_implementation("sdpa")
    return (max(stamp[-1] for stamp in stamps) - max(stamp[0] for stamp in stamps)) / steps


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
    }


def print_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print(
        f"125M Llama-like, {options.dtype}, {options.prompt} prompt tokens, {options.threads} threads, ms a decode step"
    )
    print("batch  engine  generate  x (median)  x (minima)  target  continuous   x  prefill x")
    for row in rows:
        target = row["target"] or "-"
        continuous, ratio = row.get("continuous_ms", "-"), row.get("continuous_ratio", "-")
        print(
            f"{row['batch']:5} {row['engine_ms']:7} {row['generate_ms']:9} {row['ratio']:11}"
            f" {row['ratio_of_minima']:11} {target:>7} {continuous:>11} {ratio:>5} {row['prefill_ratio']:>9}"
        )
    missed = [row["batch"] for row in rows if row["target"] and row["ratio"] < row["target"]]
    print(f"targets: {'all met' if not missed else f'missed at batch {missed}'}", file=sys.stdout)


if __name__ == "__main__":
    main()
