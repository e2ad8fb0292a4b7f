"""Streams of a real model, seeded and greedy: the same alone, among others and after a migration?

Steps the engine in this process. Each stream is asked alone, then in one batch with others, then again among others as
a migrated one, with the first half of its tokens resumed; how many differ from the stream alone is told. Nothing is
reused, so a batch computes all by itself. Of bfloat16 the distributions alone and among others are compared as well: of
two ways to compute a distribution that differ by so much in total variation a token, no way of drawing makes the tokens
differ less often.

    python benchmarks/seeded_streams.py FOLDER             # a model folder with a tokenizer

Prompts are pieces of this project's documentation. The table comes first, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from bireme.config import EngineConfig, KvCacheConfig, Limits
from bireme.engines.base import EngineContext
from bireme.engines.child.validate import Gate
from bireme.engines.torch.loading import LoadedEngine
from bireme.messages import EngineRequest, SamplingParams, TokenLogprobs
from bireme.metrics import Registry

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_LIKELIEST = 20  # tokens whose probabilities are compared

Prompt = list[int]


def main() -> None:
    options = parse()
    prompts = make_prompts(options.folder, options.streams)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{options.folder}, {device}, {options.tokens} tokens a stream, {options.batch} streams a batch")
    rows = []
    for dtype in options.dtype:
        engine = Engine(options, dtype)
        for temperature in options.temperature:
            rows.append({"dtype": dtype, "temperature": temperature, **compare(engine, prompts, temperature, options)})
            print(" ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
        if dtype == "bfloat16":
            rows.append({"dtype": dtype, "total_variation": total_variation(engine, prompts, options)})
            print(f"total variation a token, alone and among others: {rows[-1]['total_variation']:.4f}", flush=True)
    print(json.dumps({"benchmark": "seeded_streams", "device": device, "options": vars(options), "rows": rows}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    return parser.parse_args()


def make_prompts(folder: str, count: int) -> list[Prompt]:
    """Return prompts of 8 to 200 tokens, each of another place."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    text = "\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    rng, step = np.random.default_rng(5), len(ids) // count
    return [ids[at * step : at * step + int(rng.integers(8, 201))] for at in range(count)]


def compare(engine: Engine, prompts: Sequence[Prompt], temperature: float, options: argparse.Namespace) -> Any:
    """Return how many streams differ from the same alone."""
    sampling = [
        SamplingParams(temperature=temperature, seed=1000 + at, max_tokens=options.tokens, ignore_eos=True)
        for at in range(len(prompts))
    ]
    alone = engine.run(prompts, sampling, 1)
    among = engine.run(prompts, sampling, options.batch)
    halves = [tokens[: options.tokens // 2] for tokens in alone]
    moved = engine.run(prompts, sampling, options.batch, halves)
    return {
        "streams": len(prompts),
        "among_others": differing(alone, among),
        "after_migration": differing(alone, moved),
    }


def differing(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    return sum(list(left) != list(right) for left, right in zip(one, other, strict=True))


def total_variation(engine: Engine, prompts: Sequence[Prompt], options: argparse.Namespace) -> float:
    """Return half the sum of what probabilities differ by, the mean over all tokens behind equal ones."""
    prompts = prompts[: 3 * options.batch]
    sampling = [
        SamplingParams(temperature=1.0, seed=at, max_tokens=options.tokens, ignore_eos=True, logprobs=_LIKELIEST)
        for at in range(len(prompts))
    ]
    both = []
    for batch in (1, options.batch):
        both.append(list(zip(engine.run(prompts, sampling, batch), engine.logprobs, strict=True)))
    found = []
    for (one, its), (other, others) in zip(*both, strict=True):
        for at in range(len(one)):
            found.append(variation(its[at], others[at]))
            if one[at] != other[at]:
                break
    return sum(found) / len(found)


def variation(one: TokenLogprobs, other: TokenLogprobs) -> float:
    left, right = ({token: math.exp(logprob) for token, logprob, _ in entries} for entries in (one, other))
    return sum(abs(left[token] - right[token]) for token in left.keys() & right.keys()) / 2


class Engine:
    """One engine, stepped by this program."""

    def __init__(self, options: argparse.Namespace, dtype: str) -> None:
        cache = KvCacheConfig(tokens_per_block=32, max_tokens=32_768, enable_block_reuse=False)
        config = EngineConfig(max_batch_size=options.batch, max_seq_len=1024, dtype=dtype, kv_cache_config=cache)
        context = EngineContext("bench", "decode", options.folder, config, Registry("bench"))
        self._loaded = LoadedEngine(context, lambda act: act())
        while self._loaded.core.prepare():
            pass
        self._gate = Gate("decode", self._loaded.capacity, Limits(), b"")
        self._count = 0
        self.logprobs: list[list[TokenLogprobs]] = []  # of the last run's streams

    def run(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        batch: int,
        resumed: Sequence[Sequence[int]] = (),
    ) -> list[list[int]]:
        """Return the tokens of each stream, the resumed ones among them; so many are asked at once."""
        tokens = [list(ids) for ids in resumed] or [[] for _ in prompts]
        self.logprobs = [[] for _ in prompts]
        for begin in range(0, len(prompts), batch):
            self._run_batch(range(begin, min(begin + batch, len(prompts))), prompts, sampling, tokens)
        return tokens

    def _run_batch(
        self, which: range, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], tokens: list[list[int]]
    ) -> None:
        core, keys = self._loaded.core, {}
        for at in which:
            self._count += 1
            keys[(0, self._count)] = at
            prompt = np.array([*prompts[at], *tokens[at]], dtype="<i4").tobytes()
            request = EngineRequest(prompt=prompt, num_resumed=len(tokens[at]), sampling=sampling[at])
            core.requests.add(self._loaded.admission.admit((0, self._count), self._gate.admit(request)))
        while core.requests.running:
            core.step()
            outputs, plain = core.take_outputs()
            for key, token in zip(plain.keys, plain.tokens, strict=True):
                tokens[keys[key]].append(token)
            for output in outputs:
                tokens[keys[output.key]] += output.tokens
                self.logprobs[keys[output.key]] += output.logprobs or []
                if output.finish is not None and output.finish.error:
                    raise SystemExit(f"a request failed: {output.finish.error}")


if __name__ == "__main__":
    main()
