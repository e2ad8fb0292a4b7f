"""The torch engine on a GPU: decode steps against the rate at which that GPU streams bytes, prefill, throughput.

Steps the engine in this process, without a server, on random weights (bf16) of a known model's shape. Every decode
step has to read the weights and the keys and values of its sequences once (of a mixture the weights of as many experts
as so many tokens choose, if each chooses at random): `floor` is these bytes over the rate at which the GPU reads in the
same run (the better of a copy and cuBLAS's product of one row), `share` is floor over the step's mean. Tokens of a step
may be read while the next one runs, so steps are timed together. `replay` is the step's CUDA graph alone, again and
again. Short prompts, and few tokens behind a long prefix, are asked in turns with their graphs and kernel by kernel.
Long prompts, and a chunk behind a long prefix, are asked in turns with FlashAttention 3 (`fa3`, of the wheel fa3-fwd,
where the engine takes it) and with torch's own kernels; `attention` is what each of them had.

    python benchmarks/engine_gpu.py                       # 8B shape
    python benchmarks/engine_gpu.py --shape qwen3-30b-a3b --batch 1 8 32 128
    python benchmarks/engine_gpu.py --shape tiny --quick  # also without a GPU, to see that it runs

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bireme.config import CudaGraphConfig, EngineConfig, KvCacheConfig, Limits
from bireme.engines.base import EngineContext
from bireme.engines.child.validate import Gate
from bireme.engines.torch.loading import LoadedEngine
from bireme.messages import EngineRequest, SamplingParams
from bireme.metrics import Registry

_NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size".split()
_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
_LOCAL_ROPE = {"full_attention": _ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
_GEMMA2 = {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_FEW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"truncate": False, "original_max_position_embeddings": 4096}
_GPT_OSS = {"head_dim": 64, "sliding_window": 128, "num_local_experts": 32, "rope_parameters": _YARN}
_GPT_OSS |= {"num_experts_per_tok": 4}
_MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}  # its experts are made up so, and stay so on a GPU
SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {  # model type, sizes, what else it needs
    "8b": ("llama", (4096, 14336, 32, 32, 8, 128256), {}),  # Llama 3.1's
    "1b": ("llama", (2048, 8192, 16, 32, 8, 128256), {"tie_word_embeddings": True}),  # Llama 3.2's
    "gemma-2-9b": ("gemma2", (3584, 14336, 42, 16, 8, 256000), {"head_dim": 256} | _GEMMA2),
    "gemma-3-12b": (
        "gemma3_text",
        (3840, 15360, 48, 16, 8, 262208),
        {"head_dim": 256, "sliding_window": 1024, "rope_parameters": _LOCAL_ROPE},
    ),
    "qwen3-30b-a3b": ("qwen3_moe", (2048, 6144, 48, 32, 4, 151936), {"head_dim": 128} | _EXPERTS),
    "gpt-oss-20b": ("gpt_oss", (2880, 2880, 24, 64, 8, 201088), _GPT_OSS | _MXFP4),
    "gpt-oss-20b-plain": ("gpt_oss", (2880, 2880, 24, 64, 8, 201088), _GPT_OSS),  # experts in bfloat16
    "tiny": ("llama", (128, 256, 2, 8, 2, 512), {}),
    "tiny-deep": ("llama", (128, 256, 8, 8, 2, 512), {}),  # has layers enough for an EAGLE-3 head
    "tiny-gpt-oss": ("gpt_oss", (64, 64, 2, 8, 2, 512), _GPT_OSS | {"head_dim": 16} | _MXFP4),
    "tiny-experts": ("qwen3_moe", (128, 256, 2, 8, 2, 512), {"head_dim": 16} | _FEW_EXPERTS),
}
AIM_LOOP = 0.03  # of a step: what the engine adds to the replay of its graph
AIMS = {1: 0.82, 8: 0.78, 32: 0.75, 128: 0.75}  # shares at equal contexts
AIM_PREFILL = {8192: 226.0}  # ms: 0.98 of what vLLM 0.26 needed on an H100
WARM_STEPS = 4


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate, gemm_rate = stream_rate(device, options.quick), product_rate(device, options.quick)
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        bench = Bench(write_config(folder, options.shape), folder, options)
    rows = [bench.decode(name, lengths, rate) for name, lengths in decode_cases(options)]
    lengths = (40, 70) if options.quick else (2048, 4096, 8192, 8192 + 7, 32768)
    prefill = {f"{count} tokens": bench.prefill(count) for count in lengths}
    for count, prefix in ((32, 64),) if options.quick else ((2048, 6144), (2048, 30720), (1024, 30720)):
        prefill[f"{count} tokens behind {prefix}"] = bench.prefill(count, prefix)
    requests = {
        spread: bench.throughput(4 if options.quick else 64, spread == "spread") for spread in ("equal", "spread")
    }
    short = bench.short_prompts((8, 16) if options.quick else (32, 128, 256))
    report(rows, prefill, short, requests, rate, gemm_rate, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1000, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=25, help="decode steps measured a case")
    parser.add_argument(
        "--modules", action="store_true", help="transformers' own modules in place of the fused decoder"
    )
    parser.add_argument("--no-graphs", action="store_true", help="every step kernel by kernel")
    parser.add_argument("--quick", action="store_true", help="batch 1, short contexts, 4 steps, short prompts")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.context, options.steps = [1], 40, 4
    return options


def stream_rate(device: torch.device, quick: bool) -> float:
    """Return bytes a second that the device's memory gives: the best of copies (both ways) and products of one row."""
    size = 1 << 9 if quick else 1 << 15
    source = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    target, row = torch.empty_like(source), torch.ones(1, size, dtype=torch.bfloat16, device=device)
    copied = min(seconds_of(lambda: target.copy_(source), device) for _ in range(10))
    read = min(seconds_of(lambda: torch.nn.functional.linear(row, source), device) for _ in range(10))
    return max(2 * source.nbytes / copied, source.nbytes / read)


def product_rate(device: torch.device, quick: bool) -> float:
    """Return operations a second of a large product of random matrices."""
    size = 1 << 8 if quick else 1 << 13
    one, other = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2.0 * size**3 / min(seconds_of(lambda: one @ other, device) for _ in range(10))


def seconds_of(action: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def write_config(folder: str, shape: str) -> Any:
    """Return the configuration, too."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, sizes, others = SHAPES[shape]
    settings = {"tie_word_embeddings": False, "rope_parameters": _ROPE, "max_position_embeddings": 131072} | others
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config = AutoConfig.for_model(kind, **dict(zip(_NAMES, sizes, strict=True)), **settings, architectures=[name])
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return config


def step_bytes(config: Any, contexts: Sequence[int]) -> float:
    """Return what a decode step reads: all weights but the embedding table, the keys and values that its rows see."""
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    layer, kv_width = hidden * size * (2 * heads + 2 * kv_heads), kv_heads * size
    if top_k := getattr(config, "num_experts_per_tok", None):
        count = config.num_experts
        chosen = count * (1 - (1 - top_k / count) ** len(contexts))  # expected
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        share = 17 / 64 if getattr(config, "quantization_config", None) else 1  # of two bytes, in MXFP4
        layer += hidden * count + 3 * hidden * width * chosen * share
    else:
        layer += 3 * hidden * config.intermediate_size
    seen = sum(contexts) * config.num_hidden_layers
    for kind in getattr(config, "layer_types", None) or []:
        if kind == "sliding_attention":
            seen -= sum(max(0, context - config.sliding_window) for context in contexts)
    return float(2 * (config.num_hidden_layers * layer + config.vocab_size * hidden + seen * 2 * kv_width))


def decode_cases(options: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """Return (name, context lengths) of each batch."""
    random = np.random.default_rng(1)
    cases = [(f"{batch} equal", [options.context] * batch) for batch in options.batch]
    low, high = options.context // 2, options.context * 3 // 2
    cases += [(f"{batch} spread", random.integers(low, high, batch).tolist()) for batch in options.batch if batch > 1]
    if not options.quick:
        cases.append(("31 of 200, one of 16,000", [16000, *[200] * 31]))
    return cases


class Bench:
    """One engine, stepped by this program."""

    def __init__(self, shape: Any, folder: str, options: argparse.Namespace) -> None:
        self._shape, self._steps = shape, options.steps
        config = EngineConfig(
            max_batch_size=max([64, *options.batch]) if not options.quick else 4,
            max_seq_len=1024 if options.quick else 33000,
            kv_cache_config=KvCacheConfig(tokens_per_block=32, max_tokens=8192 if options.quick else None),
            load_format="dummy",
            cuda_graph_config=None if options.no_graphs else CudaGraphConfig(),
        )
        if options.modules:
            from bireme.engines.torch.forward import decoder_weights

            decoder_weights.FAMILIES = ()
        self._loaded = LoadedEngine(
            EngineContext("bench", "decode", folder, config, Registry("bench")), lambda act: act()
        )
        self._core = self._loaded.core
        while self._core.prepare():  # graphs that an engine makes before its first request, if it has the time
            pass
        self._gate = Gate("decode", self._loaded.capacity, Limits(), b"")
        self._random = np.random.default_rng(2)
        self._count = 0

    def decode(self, name: str, lengths: Sequence[int], rate: float) -> dict[str, Any]:
        """Return a step's time with these contexts, and what the bytes alone would take."""
        for length in lengths:
            self._submit(length, self._steps + 200)
        while any(not sequence.first_token_at for sequence in self._core.requests.running.values()):
            self._step()
        for _ in range(WARM_STEPS):
            self._step()
        times = [self._step()[0] for _ in range(self._steps)]
        mean = sum(times) / len(times)
        contexts = [len(sequence.tokens) for sequence in self._core.requests.running.values()]
        replay = self._replay_seconds(len(lengths))
        for key in list(self._core.requests.running):
            self._core.requests.abort(key)
        self._core.take_outputs()
        floor = step_bytes(self._shape, contexts) / rate
        return {
            "case": name,
            "batch": len(lengths),
            "step_ms": round(1e3 * mean, 2),
            "max_ms": round(1e3 * max(times), 2),
            "floor_ms": round(1e3 * floor, 2),
            "share": round(floor / mean, 3),
            "replay_ms": None if replay is None else round(1e3 * replay, 2),
        }

    def _replay_seconds(self, count: int) -> float | None:
        """Return a step's seconds if nothing but its graph is launched; None where it has none."""
        resident = self._core._parts.forward.resident
        graphs = resident.graphs.made if resident is not None else {}
        if (graph := graphs.get(min((size for size in graphs if size >= count), default=0))) is None:
            return None
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(self._steps):
            graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / self._steps

    def prefill(self, num_tokens: int, num_cached: int = 0) -> dict[str, list[float]]:
        """Return ms of three such prompts by their attention, in turns; the engine has never seen the first length.

        `num_cached`: tokens before them that are there already.
        """
        flash = self._core._parts.forward.flash
        prefix = self._random.integers(10, 500, num_cached).astype("<i4")
        if num_cached:
            self._submit(num_cached, 1, prefix)
            self._drain()
        fa3 = flash._fa3
        ways: dict[str, Any] = ({} if fa3 is None else {"fa3": fa3}) | {"torch": None}
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(3):
            for way, taken in ways.items():
                own = self._random.integers(10, 500, num_tokens).astype("<i4")
                flash._fa3 = taken
                self._submit(num_cached + num_tokens, 1, np.concatenate([prefix, own]))
                found[way].append(round(1e3 * sum(self._drain()[0]), 1))
        flash._fa3 = fa3
        return found

    def short_prompts(self, lengths: Sequence[int]) -> dict[str, dict[str, float]]:
        """Return ms to the first token, the median of five: with graphs, and kernel by kernel."""
        forward, long = self._core._parts.forward, self._random.integers(10, 500, 32 * max(lengths)).astype("<i4")
        self._submit(len(long), 1, long)
        self._drain()
        cases = {f"{length}": (length, None) for length in lengths}
        cases[f"{len(long)}, all but a block cached"] = (len(long), long)
        found: dict[str, dict[str, float]] = {}
        for name, (length, prompt) in cases.items():
            times: dict[str, list[float]] = {"graph": [], "kernels": []}
            for turn in range(10):
                graphs, mixed, way = forward.graphs, forward.mixed, "kernels" if turn % 2 else "graph"
                if turn % 2:
                    forward.graphs, forward.mixed = {}, None
                self._submit(length, 1, prompt)
                times[way].append(sum(self._drain()[0]))
                forward.graphs, forward.mixed = graphs, mixed
            found[name] = {way: round(1e3 * sorted(one)[2], 2) for way, one in times.items()}
        return found

    def throughput(self, count: int, has_spread: bool) -> dict[str, Any]:
        """Return tokens/s of `count` requests of 512/128, or of 256-768/64-192, submitted at once."""
        unit = 16 if self._loaded.capacity.max_seq_len <= 1024 else 128
        for _ in range(count):
            inputs = self._random.integers(2 * unit, 6 * unit) if has_spread else 4 * unit
            outputs = self._random.integers(unit // 2, unit * 3 // 2) if has_spread else unit
            self._submit(int(inputs), int(outputs))
        times, tokens = self._drain()
        return {"tokens_per_s": round(tokens / sum(times)), "longest_step_ms": round(1e3 * max(times), 1)}

    def _submit(self, num_tokens: int, max_tokens: int, prompt: npt.NDArray[np.int32] | None = None) -> None:
        self._count += 1
        if prompt is None:
            prompt = self._random.integers(10, 500, num_tokens).astype("<i4")
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        admitted = self._gate.admit(EngineRequest(prompt=prompt.tobytes(), sampling=sampling))
        self._core.requests.add(self._loaded.admission.admit((0, self._count), admitted))

    def _drain(self) -> tuple[list[float], int]:
        """Return every step's seconds, and the tokens, until no request is left."""
        times, tokens = [], 0
        while self._core.requests.running:
            seconds, count = self._step()
            times.append(seconds)
            tokens += count
        return times, tokens

    def _step(self) -> tuple[float, int]:
        began = time.perf_counter()
        self._core.step()
        seconds = time.perf_counter() - began
        outputs, plain = self._core.take_outputs()
        if failed := [output.finish for output in outputs if output.finish is not None and output.finish.error]:
            raise SystemExit(f"a request failed: {failed[0].error}")
        return seconds, len(plain.tokens) + sum(len(output.tokens) for output in outputs)


def report(
    rows: list[dict[str, Any]],
    prefill: dict[str, Any],
    short: dict[str, dict[str, float]],
    requests: dict[str, Any],
    rate: float,
    gemm_rate: float,
    options: argparse.Namespace,
) -> None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    print(
        f"{options.shape} shape, bf16, {name}, torch {torch.__version__}; {rate / 1e12:.2f} TB/s,"
        f" {gemm_rate / 1e12:.0f} TFLOP/s"
    )
    print(f"{'decode':28} {'step ms':>8} {'max':>8} {'floor':>8} {'share':>6} {'replay':>8}")
    for row in rows:
        figures = f"{row['step_ms']:8.2f} {row['max_ms']:8.2f} {row['floor_ms']:8.2f} {row['share']:6.1%}"
        print(f"{row['case']:28} {figures} {'' if row['replay_ms'] is None else row['replay_ms']:>8}")
    for what, by_attention in prefill.items():
        told = ", ".join(f"{way} {times}" for way, times in by_attention.items())
        print(f"prefill of {what}: {told} ms")
    for what, times in short.items():
        print(f"first token of {what}: {times['graph']:.2f} ms, kernel by kernel {times['kernels']:.2f} ms")
    for what, one in requests.items():
        print(f"requests of {what} lengths: {one['tokens_per_s']} tokens/s, longest step {one['longest_step_ms']} ms")
    found = {"rows": rows, "prefill_ms": prefill, "first_token_ms": short, "requests": requests}
    rates = {"bytes_per_s": rate, "flops_per_s": gemm_rate}
    print(json.dumps({"benchmark": "engine_gpu", "device": name, "options": vars(options), **found, **rates}))
    for count, most in AIM_PREFILL.items() if torch.cuda.is_available() and options.shape == "8b" else ():
        median = sorted(next(iter(prefill[f"{count} tokens"].values())))[1]
        print(f"aim: prefill of {count} tokens {median} ms, {most} asked for: {'ok' if median <= most else 'BELOW'}")
    for row in rows:
        asked = AIMS.get(row["batch"])
        if torch.cuda.is_available() and options.shape == "8b" and asked and row["case"].endswith("equal"):
            word = "ok" if row["share"] >= asked else "BELOW"
            print(f"aim: batch {row['batch']} {row['share']:.0%} of the read rate, {asked:.0%} asked for: {word}")
            if row["replay_ms"]:
                more = row["step_ms"] / row["replay_ms"] - 1
                word = "ok" if more <= AIM_LOOP else "BELOW"
                print(f"aim: batch {row['batch']} {more:.1%} over its graph alone, {AIM_LOOP:.0%} asked for: {word}")


if __name__ == "__main__":
    main()
