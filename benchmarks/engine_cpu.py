"""The torch engine on CPU against transformers' generate and its continuous batching, in one run.

Makes a 125M Llama-like model with random weights (bf16, 12 layers of 768, vocabulary 32,000) in a temporary
folder, or a mixture of experts of the same width (Qwen3-MoE's kind). For each batch size the engine's decode steps
are interleaved with `generate`'s own (a DynamicCache), step by step, inside one `generate` call, so that both see the
same machine, and with those of an engine on transformers' own modules, as it runs architectures for which it has no
decoder; ratios are of medians (and of minima beside them). The engines have `dtype: auto`, generate the dtype in which
its own step takes less here. Continuous batching can't be interleaved: it runs before and after, the better run counts.

    python benchmarks/engine_cpu.py
    python benchmarks/engine_cpu.py --quick --cases 1x128 --isa avx2     # as on a CPU without AVX-512 and bfloat16

The table comes first, then the aims; the last line of stdout is one JSON document.
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
from collections.abc import Callable
from typing import Any

from bireme.engines.stub.environment import OPENMP

os.environ |= OPENMP  # before torch; an engine process has it, generate has it here, too
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch, too: an engine would take a GPU
if "avx2" in sys.argv:
    os.environ |= {"DNNL_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}  # before torch, too

import numpy as np
import torch

from bireme.config import EngineConfig, KvCacheConfig, Limits
from bireme.engines.base import EngineContext
from bireme.engines.child.validate import Gate
from bireme.engines.torch.forward import decoder_weights
from bireme.engines.torch.loading import LoadedEngine
from bireme.messages import EngineRequest, SamplingParams
from bireme.metrics import Registry

AIMS = {(1, 128): 1.5, (8, 128): 2.0, (32, 128): 2.2, (8, 1024): 3.5}  # times generate's speed
AIM_REST = 0.03  # of a step: all but the model and the choice of tokens
PAGE = 32
PREFILLS = 2
WARM_UP = 2  # decode steps that do not count


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        make_model(folder, options.experts)
        rows = [measure(folder, batch, prompt, options) for batch, prompt in options.cases]
    print_table(rows, options)
    print(json.dumps({"benchmark": "engine_cpu", "machine": machine(), "options": vars(options), "rows": rows}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", type=case, nargs="+", default=list(AIMS), help="batch x prompt tokens, such as 1x128"
    )
    parser.add_argument("--steps", type=int, default=48, help="decode steps measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0, help="a mixture of so many a layer, of which a token has 4")
    parser.add_argument("--isa", choices=("all", "avx2"), default="all", help="instructions that may be used")
    parser.add_argument("--quick", action="store_true", help="12 steps, and no continuous batching")
    options = parser.parse_args()
    if options.quick:
        options.steps = min(options.steps, 12)
    return options


def case(text: str) -> tuple[int, int]:
    batch, prompt = text.split("x")
    return int(batch), int(prompt)


def make_model(folder: str, num_experts: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
    }
    if num_experts:
        experts = {"num_experts": num_experts, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, head_dim=64, **experts))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model.to(torch.bfloat16).save_pretrained(folder)


def measure(folder: str, batch: int, prompt: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one batch size and length."""
    prompts = np.random.default_rng(batch).integers(10, 32000, (batch, prompt))
    model = best_model(folder, prompts)
    continuous = [] if options.quick else [continuous_batching(model, prompts, options.steps)]
    taken = interleave(
        engine(folder, prompts, options), engine(folder, prompts, options, True), model, prompts, options
    )
    if not options.quick:
        continuous.append(continuous_batching(model, prompts, options.steps))
    ours, modules, theirs = (statistics.median(times) for times in (taken.ours.s, taken.modules.s, taken.generate_s))
    row: dict[str, Any] = {
        "batch": batch,
        "prompt": prompt,
        "dtype": taken.ours.dtype,
        "engine_ms": round(1e3 * ours, 2),
        "generate_dtype": str(model.dtype).removeprefix("torch."),
        "generate_ms": round(1e3 * theirs, 2),
        "ratio": round(theirs / ours, 3),
        "ratio_of_minima": round(min(taken.generate_s) / min(taken.ours.s), 3),
        "aim": None if options.experts else AIMS.get((batch, prompt)),
        "modules_ms": round(1e3 * modules, 2),
        "modules_ratio": round(modules / ours, 3),
        "rest_share": round(statistics.median(taken.ours.rest_s) / ours, 4),
        "sampling_share": round(statistics.median(taken.ours.sampling_s) / ours, 4),
        "prefill_ratio": round(taken.generate_prefill_s / taken.ours.prefill_s, 3),
        "modules_prefill_ratio": round(taken.modules.prefill_s / taken.ours.prefill_s, 3),
    }
    if continuous:
        row["continuous_ms"] = round(1e3 * min(continuous), 2)
        row["continuous_ratio"] = round(min(continuous) / ours, 3)
    return row


def best_model(folder: str, prompts: Any) -> Any:
    """Return the model in the dtype in which transformers' own decode step takes less."""
    from transformers import AutoModelForCausalLM, DynamicCache, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    models, seconds = [], []
    for dtype in (torch.bfloat16, torch.float32):
        models.append(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
    caches = [DynamicCache(config=model.config) for model in models]
    ids = torch.from_numpy(prompts[:, :32])
    with torch.inference_mode():
        for _ in range(8):  # in turns: what else the machine does meets both
            for model, cache in zip(models, caches, strict=True):
                began = time.perf_counter()
                model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                seconds.append(time.perf_counter() - began)
            ids = ids[:, :1]
    least = [min(seconds[first::2][1:]) for first in range(2)]  # but for the prompt
    return models[least.index(min(least))]


def engine(folder: str, prompts: Any, options: argparse.Namespace, on_modules: bool = False) -> SteppedEngine:
    batch, prompt = prompts.shape
    length = prompt + options.steps + 16
    config = EngineConfig(
        max_batch_size=batch,
        max_num_tokens=max(2048, batch * prompt),
        max_seq_len=length,
        kv_cache_config=KvCacheConfig(tokens_per_block=PAGE, max_tokens=batch * (length + PAGE)),
    )
    context = EngineContext("bench", "decode", folder, config, Registry("bench"), num_threads=options.threads)
    families = decoder_weights.FAMILIES
    if on_modules:
        decoder_weights.FAMILIES = ()
    try:
        return SteppedEngine(LoadedEngine(context, lambda action: action()))
    finally:
        decoder_weights.FAMILIES = families


class SteppedEngine:
    """A core without the engine's thread, and the seconds that its steps take."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        self._step_s: list[float] = []
        self._model_s: list[float] = []
        self._sampling_s: list[float] = []
        self.prefill_s = float("inf")
        parts = loaded.core._parts
        parts.forward.compute = timed(parts.forward.compute, self._model_s)  # type: ignore[method-assign]
        parts.sampler.sample = timed(parts.sampler.sample, self._sampling_s)  # type: ignore[method-assign]

    @property
    def dtype(self) -> str:
        return self._loaded.capacity.dtype

    @property
    def s(self) -> list[float]:
        return self._step_s[WARM_UP:]

    @property
    def sampling_s(self) -> list[float]:
        return self._sampling_s[WARM_UP:]

    @property
    def rest_s(self) -> list[float]:
        """The scheduler's and the bookkeeping's."""
        parts = zip(self._step_s, self._model_s, self._sampling_s, strict=True)
        return [step - model - sampling for step, model, sampling in parts][WARM_UP:]

    def prefill(self, prompts: Any, max_tokens: int, attempt: int) -> None:
        """Take the least time of all attempts; the last one's requests stay for decode."""
        for number in range(len(prompts) if attempt else 0):
            self._loaded.core.requests.abort((attempt - 1, number + 1))
        began = time.perf_counter()
        submit(self._loaded, prompts + attempt, max_tokens, attempt)  # other prompts: nothing is reused
        self._loaded.core.step()
        self.prefill_s = min(self.prefill_s, time.perf_counter() - began)
        self._model_s.clear()
        self._sampling_s.clear()

    def step(self) -> None:
        began = time.perf_counter()
        self._loaded.core.step()
        self._loaded.core.take_outputs()
        self._step_s.append(time.perf_counter() - began)


class Interleaver:
    """A stopping criterion that lets both engines do a step after each of generate's."""

    def __init__(self, ours: SteppedEngine, modules: SteppedEngine) -> None:
        self.ours, self.modules = ours, modules
        self.generate_prefill_s = float("inf")
        self._generate_s: list[float] = []
        self._resumed_at = 0.0

    @property
    def generate_s(self) -> list[float]:
        return self._generate_s[WARM_UP - 1 :]  # the first is not among them: it holds its prefill

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self._resumed_at:
            self._generate_s.append(time.perf_counter() - self._resumed_at)
        self.ours.step()
        self.modules.step()
        self._resumed_at = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            seconds.append(time.perf_counter() - began)

    return call


@torch.inference_mode()  # type: ignore[untyped-decorator]
def interleave(
    ours: SteppedEngine, modules: SteppedEngine, model: Any, prompts: Any, options: argparse.Namespace
) -> Interleaver:
    """Compute the prompts with each in turns, then the tokens that follow."""
    taken, ids = Interleaver(ours, modules), torch.from_numpy(prompts)
    for attempt in range(PREFILLS):
        began = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        taken.generate_prefill_s = min(taken.generate_prefill_s, time.perf_counter() - began)
        for each in (ours, modules):
            each.prefill(prompts, options.steps + 8, attempt)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.steps + 2,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[taken],
    )
    return taken


def submit(loaded: LoadedEngine, prompts: Any, max_tokens: int, attempt: int) -> None:
    gate = Gate("decode", loaded.capacity, Limits(), b"")
    for number, prompt in enumerate(prompts):
        request = EngineRequest(
            prompt=(prompt % 32000).astype("<i4").tobytes(),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        loaded.core.requests.add(loaded.admission.admit((attempt, number + 1), gate.admit(request)))


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
    kind = f"{options.experts} experts a layer" if options.experts else "125M Llama-like"
    print(f"{kind}, {options.threads} threads, instructions: {options.isa}; ms a decode step")
    print(
        "batch prompt  engine dtype     generate dtype     x (median)  x (minima)  modules     x  continuous     x"
        "  prefill x  of modules  rest"
    )
    for row in rows:
        continuous, ratio = row.get("continuous_ms", "-"), row.get("continuous_ratio", "-")
        print(
            f"{row['batch']:5} {row['prompt']:6} {row['engine_ms']:7} {row['dtype']:9} {row['generate_ms']:8}"
            f" {row['generate_dtype']:9} {row['ratio']:10} {row['ratio_of_minima']:11} {row['modules_ms']:8}"
            f" {row['modules_ratio']:5} {continuous:>11} {ratio:>5} {row['prefill_ratio']:>10}"
            f" {row['modules_prefill_ratio']:>11} {row['rest_share']:5.1%}"
        )
    for row in rows:
        name, ratio, share = f"batch {row['batch']}, {row['prompt']} prompt tokens", row["ratio"], row["rest_share"]
        if asked := row["aim"]:
            print(f"aim: {name}: {ratio:.2f} x generate, {asked:g} asked for: {word(ratio >= asked)}")
        is_little = word(share <= AIM_REST)
        print(f"aim: {name}: scheduler and bookkeeping {share:.1%} of a step, {AIM_REST:.0%} allowed: {is_little}")


def word(is_reached: bool) -> str:
    return "ok" if is_reached else "MISSED"


if __name__ == "__main__":
    main()
