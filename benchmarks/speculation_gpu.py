"""Speculative decoding on a GPU: what drafts of a given quality gain, on random weights of a known model's shape.

One engine with its thread in this process, without a server, with `decoding_type: Synthetic`: which drafts are right is
drawn, everything else is done as ever. Before each step the n-gram look-up is run as well, and its drafts are thrown
away, so that a drafter's cost is paid. Streams run at each batch size, in turns without drafts and at each rate of
acceptance, forth and back. Told are

* tokens a step of a stream, tokens/s, and both over those without drafts;
* `drafter`: ms that proposals take, n-grams looked up; `step`: ms from a step's launch to its tokens; `host`: ms from a
  step's tokens to the launch of the next one (of steps that are started ahead there is none), medians.

Then requests come at random (Poisson), with drafts and without, as in arrivals_gpu.py.

With `--head` an EAGLE-3 head of the model's shape and random weights drafts instead, and what it drafts is verified:
`drafter` is what the host takes to start its rounds, whose own time is the step's, `seen` what it takes to keep and see
what steps made, both medians. Which of its tokens are
right is drawn as ever. `--by-passes` has it do without rounds of one launch, one pass after the other.

    python benchmarks/speculation_gpu.py                       # 8B shape, two minutes
    python benchmarks/speculation_gpu.py --batch 1,8 --rates 0.7 --no-arrivals
    python benchmarks/speculation_gpu.py --head --batch 1,8,64 --rates 0.7 --no-arrivals
    python benchmarks/speculation_gpu.py --shape tiny --quick  # also without a GPU, to see that it runs
    python benchmarks/speculation_gpu.py --head --shape tiny-deep --quick  # a head reads three layers

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.arrivals_gpu import Running, arrivals, quantiles, wait_until
from benchmarks.engine_gpu import SHAPES, write_config
from benchmarks.options import numbers
from bireme.engines.torch.scheduling.speculation.lengths import MeasuredLengths
from bireme.engines.torch.scheduling.speculation.ngram import NgramDrafter
from bireme.engines.torch.scheduling.speculation.synthetic import SyntheticDrafter
from bireme.settings import SpeculativeConfig

DRAFT = 3  # tokens
AIMS = {  # acceptance -> batch -> tokens/s over those without drafts
    0.7: {1: 2.0, 8: 1.8, 64: 1.5},
    0.4: {1: 1.1, 8: 1.1},
    0.1: {1: 0.97, 8: 0.97, 64: 0.97, 128: 0.97},
}
AIM_TPOT, AIM_TTFT = 0.75, 1.05  # under arrivals at acceptance 0.7, over those without drafts
AIM_HOST_MS = 0.5  # between two steps with drafts, at batch 1
ARRIVALS, ARRIVALS_ACCEPTANCE = 20.0, 0.7  # requests a second
HEAD_AIMS = {0.7: {1: 1.75, 8: 1.6, 64: 1.35}}  # the same of a head
HEAD_VOCABULARY = 32000  # tokens that it drafts, at most a quarter of the model's: that of published heads
_MOST_CONTEXT = 380_000  # tokens of all streams together, that an 80 GB card has room for beside the 8B shape


class PaidDrafter(SyntheticDrafter):
    """Looks n-grams up as well, and tells what both take."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._ngrams = NgramDrafter(3, True)
        self.seconds: list[float] = []

    def propose(self, most: Mapping[Any, int], budget: int = 0) -> dict[Any, Any]:
        began = time.perf_counter()
        self._ngrams.propose(most)
        found = super().propose(most)
        self.seconds.append(time.perf_counter() - began)
        return found


class PaidHead:
    """The drafter of an engine with a head; which of its drafts are right is drawn."""

    acceptance_rate = 0.0

    def __init__(self, drafter: Any, by_passes: bool) -> None:
        self.costs, self.num_kinds, self.own = drafter.costs, drafter.num_kinds, drafter
        self.seconds: list[float] = []
        self.seen: list[float] = []
        self._propose, self._observe = drafter.propose, drafter.observe
        drafter.propose, drafter.observe = self.propose, self.observe
        if by_passes:
            drafter._passes.rounds = drafter.costs.at_once = None

    def propose(self, most: Mapping[Any, int], budget: int = 0) -> dict[Any, Any]:
        began = time.perf_counter()
        found = self._propose(most, budget)
        right = SyntheticDrafter(self.acceptance_rate).propose({one: len(draft.tokens) for one, draft in found.items()})
        self.seconds.append(time.perf_counter() - began)
        return {one: replace(draft, num_right=right[one].num_right) for one, draft in found.items()}

    def observe(self, *given: Any) -> float:
        began = time.perf_counter()
        found: float = self._observe(*given)
        self.seen.append(time.perf_counter() - began)
        return found


def write_head(folder: Path, shape: str) -> Path:
    """Write a head for the model of that shape, as wide as its layers, of random weights; return its folder."""
    from safetensors.torch import save_file

    from bireme.engines.torch.weights.eagle_checkpoint import read_shape

    base = write_config(str(folder), shape)
    config = {name: getattr(base, name) for name in (*_SIZES, "hidden_size", "vocab_size", "rms_norm_eps")}
    count = min(HEAD_VOCABULARY, base.vocab_size // 4)
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": count}
    folder = folder / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 500000.0}))
    device, ids = "cuda" if torch.cuda.is_available() else "cpu", 4 * torch.arange(count)
    tensors = {}
    for name, size in read_shape(folder, base).tensors.items():
        weights = torch.randn(size, dtype=torch.bfloat16, device=device) / 50 if len(size) > 1 else torch.ones(size)
        tensors[name] = weights.to("cpu", torch.bfloat16)
    tensors |= {"d2t": ids - torch.arange(count)}
    tensors |= {"t2d": torch.zeros(base.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)}
    save_file(tensors, folder / "model.safetensors")
    return folder


_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")


class Watch:
    """When steps are launched and their tokens come."""

    def __init__(self, core: Any) -> None:
        self.steps: list[float] = []
        self.hosts: list[float] = []
        self._launched = self._heard = 0.0
        forward = core._parts.forward
        for steps in (forward.resident, forward.verifying, forward.mixed):
            if steps is not None:
                self._watch(steps)

    def reset(self) -> None:
        self.steps, self.hosts, self._heard = [], [], 0.0

    def _watch(self, steps: Any) -> None:
        start, watch = steps.start, self

        def started(plan: Any, row_of: Any, ahead: int = 0) -> Any:
            flight = start(plan, row_of, ahead)
            now = time.perf_counter()
            if not ahead and watch._heard:
                watch.hosts.append(now - watch._heard)
            launched, has_read = now, False
            read = flight.read

            def heard() -> list[int]:
                nonlocal has_read
                found: list[int] = read()
                if not has_read:
                    has_read, watch._heard = True, time.perf_counter()
                    watch.steps.append(watch._heard - launched)
                return found

            return Heard(flight, heard)

        steps.start = started


class Heard:
    """A flight whose `read` is watched."""

    def __init__(self, flight: Any, read: Any) -> None:
        self._flight, self.read = flight, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flight, name)


class Speculating(Running):
    """The engine, and how its drafts are switched."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        drafts = SpeculativeConfig(decoding_type="Synthetic", max_draft_len=DRAFT, acceptance_rate=0.0)
        if options.head:
            head = str(write_head(Path(folder), options.shape))
            drafts = SpeculativeConfig(decoding_type="Eagle3", max_draft_len=DRAFT, speculative_model=head)
        super().__init__(folder, options, drafts=drafts)
        speculation, self.watch = self._core._parts.speculation, Watch(self._core)
        self.drafter: PaidHead | PaidDrafter = PaidDrafter()
        if options.head:
            self.drafter = PaidHead(speculation.drafter, options.by_passes)
        else:
            self._post(lambda: setattr(speculation, "drafter", self.drafter))

    def draft(self, acceptance: float | None) -> None:
        """Have drafts be right so often, of which nothing is known yet; None: no drafts."""
        parts = self._core._parts

        def change() -> None:
            speculation = parts.speculation
            speculation.is_on = acceptance is not None
            self.drafter.acceptance_rate = acceptance or 0.0
            plain = speculation.by_cpu or parts.costs
            costs = (plain, speculation.verifying or plain)
            speculation.lengths = MeasuredLengths(*costs, self.drafter.num_kinds, drafting=self.drafter.costs)
            for sequence in self._core.requests.running.values():
                if sequence.drafting is not None:
                    sequence.drafting.trials.clear()
                    sequence.drafting.num_lent_for = -1

        self._post(change)

    def counted(self) -> tuple[Counter[str], int]:
        """Return how many steps there were of each path since the last call, and how many tokens were drafted."""
        steps: Counter[str] = Counter()
        drafted = 0
        for name, labels, value in self.metrics.take_delta().counters:
            if name == "bireme_engine_steps_total":
                steps[str(labels[-1])] += int(value)
            drafted += int(value) if name == "bireme_draft_tokens_total" else 0
        return steps, drafted


def streams(engine: Speculating, batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each rate of acceptance, without drafts first."""
    length = min(options.most_tokens, _MOST_CONTEXT // batch - options.context)
    asked = [engine.submit(options.context, length) for _ in range(batch)]
    wait_until(lambda: all(one.times for one in asked))
    kinds: list[float | None] = [None, *options.rates]
    found: dict[float | None, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for turn in range(options.turns):
        for kind in kinds if turn % 2 == 0 else reversed(kinds):
            engine.draft(kind)
            time.sleep(options.settle)
            found[kind].append(measured(engine, asked, options.seconds))
    is_short = any(one.is_over.is_set() for one in asked)
    engine.abort_all()
    if is_short and not options.quick:
        raise SystemExit(f"streams ended before they were measured: batch {batch}, {length} tokens each; --most-tokens")
    return [merged(batch, kind, rows) for kind, rows in found.items()]


def measured(engine: Speculating, asked: list[Any], seconds: float) -> dict[str, Any]:
    engine.counted()
    drafter = engine.drafter
    drafter.seconds, before = [], sum(len(one.times) for one in asked)
    if isinstance(drafter, PaidHead):
        drafter.seen = []
    engine.watch.reset()
    began = time.perf_counter()
    time.sleep(seconds)
    tokens, took = sum(len(one.times) for one in asked) - before, time.perf_counter() - began
    steps, drafted = engine.counted()
    return {
        "tokens_per_s": tokens / took,
        "tokens_a_step": tokens / len(asked) / max(1, sum(steps.values())),
        "drafted": drafted,
        "steps": dict(steps),
        "drafter_ms": median_ms(drafter.seconds),
        "seen_ms": median_ms(drafter.seen) if isinstance(drafter, PaidHead) else None,
        "step_ms": median_ms(engine.watch.steps),
        "host_ms": median_ms(engine.watch.hosts),
    }


def median_ms(seconds: list[float]) -> float | None:
    return round(1e3 * statistics.median(seconds), 3) if seconds else None


def merged(batch: int, acceptance: float | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of turns."""
    found: dict[str, Any] = {"batch": batch, "acceptance": acceptance, "turns": rows}
    for name in ("tokens_per_s", "tokens_a_step", *_TIMES):
        known = [row[name] for row in rows if row[name] is not None]
        found[name] = round(sum(known) / len(known), 3) if known else None
    return found


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        write_config(folder, options.shape)
        engine = Speculating(folder, options)
        rows = [row for batch in options.batch for row in streams(engine, batch, options)]
        loads: dict[str, dict[str, Any]] = {}
        for kind in () if options.no_arrivals else (None, ARRIVALS_ACCEPTANCE):
            engine.draft(kind)
            asked = argparse.Namespace(**vars(options) | {"seconds": options.arrivals_seconds})
            loads["without" if kind is None else "drafts"] = arrivals(engine, options.arrivals, asked)
        engine.stop()
    report(rows, loads, options)


def report(rows: list[dict[str, Any]], loads: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    print(f"{options.shape} shape, bf16, {name}, torch {torch.__version__}; drafts of {DRAFT} tokens")
    head = zip((*_COLUMNS, *(name.removesuffix("_ms") for name in _TIMES)), (5, 7, 9, 6, 7, 8, 7, 7, 7), strict=True)
    print(" ".join(f"{name:>{width}}" for name, width in head))
    without = {row["batch"]: row["tokens_per_s"] for row in rows if row["acceptance"] is None}
    for row in rows:
        row["gain"] = round(row["tokens_per_s"] / max(without[row["batch"]], 1e-9), 3)
        right = "none" if row["acceptance"] is None else f"{row['acceptance']:g}"
        times = " ".join(f"{told(row[what]):>{width}}" for what, width in zip(_TIMES, (8, 7, 7, 7), strict=True))
        rate, gain, a_step = row["tokens_per_s"], row["gain"], row["tokens_a_step"]
        print(f"{row['batch']:>5} {right:>7} {rate:9.1f} {gain:6.2f} {a_step:7.2f} {times}")
    for what, cell in loads.items():
        parts = ", ".join(f"{one} {quantiles(cell, one)}" for one in ("ttft", "tpot", "gap"))
        print(f"{options.arrivals:g} requests/s, {what}: {parts} ms p50/p90/p99, {cell['tokens_per_s']} tokens/s")
    found = {"benchmark": "speculation_gpu", "device": name, "options": vars(options), "rows": rows, "loads": loads}
    print(json.dumps(found))
    if torch.cuda.is_available() and options.shape == "8b":
        aims(rows, loads, HEAD_AIMS if options.head else AIMS)


_COLUMNS = ("batch", "right", "tokens/s", "gain", "a step")
_TIMES = ("drafter_ms", "seen_ms", "step_ms", "host_ms")


def told(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def aims(
    rows: list[dict[str, Any]], loads: dict[str, dict[str, Any]], gains: Mapping[float, Mapping[int, float]]
) -> None:
    for row in rows:
        if (asked := gains.get(row["acceptance"], {}).get(row["batch"])) is not None:
            aim(f"batch {row['batch']} at {row['acceptance']:g}, times", row["gain"], asked, row["gain"] >= asked)
        if row["batch"] == 1 and row["acceptance"] == max(AIMS) and row["host_ms"] is not None:
            aim("host between steps at batch 1, ms", row["host_ms"], AIM_HOST_MS, row["host_ms"] <= AIM_HOST_MS)
    if loads:
        for what, most in (("tpot", AIM_TPOT), ("ttft", AIM_TTFT)):
            ratio = loads["drafts"][f"{what}_p50_ms"] / loads["without"][f"{what}_p50_ms"]
            aim(f"{what.upper()} p50 at {ARRIVALS:g} requests/s, times", ratio, most, ratio <= most)


def aim(what: str, found: float, asked: float, is_reached: bool) -> None:
    print(f"aim: {what} {found:.2f}, {asked:g} asked for: {'ok' if is_reached else 'BELOW'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batch", type=numbers(int), default=[1, 8, 64, 128], help="streams: 1,8,64,128")
    parser.add_argument("--rates", type=numbers(float), default=[0.7, 0.4, 0.1], help="of acceptance: 0.7,0.4,0.1")
    parser.add_argument("--context", type=int, default=1000, help="tokens of each stream's prompt")
    parser.add_argument("--most-tokens", type=int, default=6000, help="of a stream's answer, where the card has room")
    parser.add_argument("--turns", type=int, default=2, help="of each rate")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--arrivals-seconds", type=float, default=12.0, help="of arrivals, with drafts and without")
    parser.add_argument("--settle", type=float, default=0.4, help="seconds before each turn that are not measured")
    parser.add_argument("--head", action="store_true", help="a head of random weights drafts")
    parser.add_argument("--by-passes", action="store_true", help="the head's passes one after the other")
    parser.add_argument("--no-arrivals", action="store_true")
    parser.add_argument("--quick", action="store_true", help="few streams and short ones, no figures worth having")
    options = parser.parse_args()
    options.gap, options.long_share, options.long, options.arrivals = 0.0, 0.0, 0, ARRIVALS
    if options.quick:
        options.batch, options.context, options.turns, options.most_tokens = [1, 2], 20, 1, 900
        options.seconds, options.settle = 0.2, 0.05
        options.arrivals, options.arrivals_seconds = 4.0, 3.0
    return options


if __name__ == "__main__":
    main()
