"""What rows that need the host for their choice cost the others: guided, penalized and measured rows beside plain ones.

An engine with its thread in this process, on random weights (bf16) of a known model's shape, without a server, and a
vocabulary of as many made-up words as the model has. Requests of equal lengths run together; told is the time between
two tokens of a plain one (where there is none, of the first), over many steps, and how long the host works for the
choices of a step. `landed`: no step is started before the tokens of the one before it are read where it has such a row.

    python benchmarks/guided_gpu.py                       # 8B shape, 32 rows
    python benchmarks/guided_gpu.py --shape tiny --quick  # also without a GPU, to see that it runs

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.arrivals_gpu import Asked, Running, aim, ms, wait_until
from benchmarks.engine_gpu import SHAPES, write_config
from bireme.engines.stub.environment import usable_cores
from bireme.engines.torch.scheduling.late_choices import LateChoices

AIM_FEW, AIM_ALL = 1.05, 1.3  # of a step without such rows: with one guided and one penalized, with all guided
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["north", "south west", None]},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
GUIDE = {"json": {"type": "array", "items": ITEM, "minItems": 200}}  # more than a row comes to
SAMPLED = {"temperature": 1.0, "seed": 7}
PENALIZED = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, **SAMPLED}
WAYS = ("ahead", "landed")


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        config = write_config(folder, options.shape)
        write_tokenizer(Path(folder), config.vocab_size)
        engine = Rows(folder, options)
        cells = {way: [] for way in WAYS}
        for turn in range(options.turns):
            for way in WAYS:
                engine.choose(way)
                cells[way].append({name: engine.steps(kinds, turn) for name, kinds in mixes(options.rows).items()})
        engine.stop()
    report(cells, options)


def mixes(rows: int) -> dict[str, dict[str, int]]:
    """Return the cells: how many of each kind."""
    return {
        "plain": {"plain": rows},
        "one guided, one penalized": {"plain": rows - 2, "guided": 1, "penalized": 1},
        "one of each, one measured": {"plain": rows - 3, "guided": 1, "penalized": 1, "measured": 1},
        "all penalized": {"penalized": rows},
        "all guided": {"guided": rows},
    }


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Make up a byte-level vocabulary: bytes, then words, many with a space before them, numbers and punctuation."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel

    rng = random.Random(1)
    names = dict.fromkeys(["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet())])
    kinds = ["etaoinshrdlcumwfgypbvk", "ETAOINSHRDLU", "0123456789", "\"',.:;{}[]()-_/ \n"]
    letters = [[_byte_level(letter) for letter in kind] for kind in kinds]
    while len(names) < vocab_size:
        (kind,) = rng.choices(letters, [16, 2, 1, 1])
        word = "".join(rng.choices(kind, k=rng.randint(2, 10)))
        names[word if rng.random() < 0.5 else _byte_level(" ") + word] = None
    vocab = {name: at for at, name in enumerate(list(names)[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _byte_level(letter: str) -> str:
    return {" ": "\u0120", "\n": "\u010a"}.get(letter, letter)


class Landed(LateChoices):
    def needs_host(self, batch: Any) -> bool:
        return any(not self._sampler.row(one.key).is_simple for one in batch)


class Rows(Running):
    """Batches of rows of several kinds."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        super().__init__(folder, options, num_threads=options.threads)
        self._context, self._num_steps = options.context, options.steps
        self._host_s: list[float] = []
        compiled = self._ask("guided", 0)
        wait_until(lambda: compiled.times or compiled.is_over.is_set())
        self.abort_all()

    def choose(self, way: str) -> None:
        """Have late rows end the overlap, or not."""
        late = (Landed if way == "landed" else LateChoices)(self._core._parts.sampler)
        choose = late.choose

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            found = choose(*args)
            self._host_s.append(time.perf_counter() - began)
            return found

        def change() -> None:
            late.choose = timed  # type: ignore[method-assign]
            self._core._late = late

        self._post(change)

    def steps(self, kinds: dict[str, int], turn: int) -> dict[str, float]:
        """Return ms of the steps of a batch."""
        asked = [self._ask(kind, turn) for kind, count in kinds.items() for _ in range(count)]
        wait_until(lambda: all(len(one.times) > 8 or one.is_over.is_set() for one in asked))
        first, watched = len(asked[0].times), asked[0]
        self._host_s.clear()
        wait_until(lambda: len(watched.times) > first + self._num_steps or watched.is_over.is_set())
        host = list(self._host_s)
        assert not any(one.error for one in asked), [one.error for one in asked]
        self.abort_all()
        gaps = watched.gaps[first:]
        found = {f"p{quantile}_ms": ms(np.percentile(gaps, quantile)) for quantile in (50, 90, 99)}
        return found | {"mean_ms": ms(np.mean(gaps)), "host_ms": ms(np.median(host)) if host else 0.0}

    def _ask(self, kind: str, turn: int) -> Asked:
        count = 400 + 2 * self._num_steps
        free: dict[str, Any] = {"ignore_eos": True}
        asked: dict[str, dict[str, Any]] = {
            "plain": free,
            "penalized": free | PENALIZED,
            "measured": free | {"logprobs": 5},
            "guided": {"guided_decoding": GUIDE, "ignore_eos": False, **SAMPLED},
        }
        return self.submit(self._context + turn, count, **asked[kind])


def report(cells: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    print(f"{options.shape} shape, bf16, {options.rows} rows of {options.context} tokens, {name}")
    worst: dict[str, float] = {}
    for way, turns in cells.items():
        for turn in turns:
            plain = turn["plain"]["p50_ms"]
            for mix, found in turn.items():
                ratio = found["p50_ms"] / plain
                if way == "ahead":
                    worst[mix] = max(worst.get(mix, 0.0), ratio)
                quantiles = " / ".join(f"{found[f'p{quantile}_ms']:.2f}" for quantile in (50, 90, 99))
                print(
                    f"{way:6} {mix:26} {quantiles} ms p50/p90/p99, mean {found['mean_ms']:.2f}, {ratio:.3f}x of plain,"
                    f" host {found['host_ms']:.2f} ms a step"
                )
    print(json.dumps({"benchmark": "guided_gpu", "device": name, "options": vars(options), "cells": cells}))
    if torch.cuda.is_available() and options.shape == "8b" and options.rows == 32:
        aim(
            "a step with one guided and one penalized row among 32, of one without",
            worst["one guided, one penalized"],
            AIM_FEW,
        )
        aim("a step of 32 guided rows, of one without", worst["all guided"], AIM_ALL)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1000, help="tokens of each row's prompt")
    parser.add_argument("--steps", type=int, default=200, help="measured a cell")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of the engine; a recipe's default")
    parser.add_argument("--quick", action="store_true", help="few rows and steps, no figures worth having")
    options = parser.parse_args()
    options.gap = 0.0
    if options.quick:
        options.rows, options.context, options.steps, options.turns = 4, 20, 10, 1
    return options


if __name__ == "__main__":
    main()
