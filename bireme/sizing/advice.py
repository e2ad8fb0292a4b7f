"""Which deployment a load needs: layouts are simulated, the smallest that holds the target is taken.

A layout holds a target when enough requests are within it. Both ways to serve, aggregated and prefill apart, are sought
up to a number of GPUs and compared by how far the rate may rise until the target is lost.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from bireme.sizing.pareto import EQUAL_WITHIN
from bireme.sizing.simulator.cluster import ClusterSettings, simulate
from bireme.sizing.simulator.outcome import Outcome, percentile_ms
from bireme.sizing.simulator.trace import SimulatedRequest, Trace, faster, spread
from bireme.sizing.step_times import StepTimes

Way = Literal["aggregated", "apart"]
WAYS: tuple[Way, ...] = ("aggregated", "apart")
TOKENS_PER_BLOCK = 64  # of loads that are made here
MOST_REQUESTS = 6000  # of one simulation
_LEAST_S = 60.0  # of a load: a queue that grows is seen
MOST_SPEED = 16.0  # times the rate: a capacity beyond is not sought
_NEAR = 1.06  # bounds of a capacity lie so near
_RECUT_S = 60.0  # of a trace: arrivals are drawn anew within such stretches

Loads = Callable[[int, float], Sequence[SimulatedRequest]]  # draw of arrivals, times the rate


class OutOfTimeError(Exception):
    """The search may take no longer."""


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    prefill: int  # 0: aggregated
    decode: int

    @property
    def gpus(self) -> int:
        return self.prefill + self.decode

    @property
    def way(self) -> Way:
        return "apart" if self.prefill else "aggregated"

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}" if self.prefill else str(self.decode)


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """Of this share of requests: the first token, and the mean gap between tokens."""

    ttft_ms: float
    itl_ms: float
    share: float = 0.9


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a layout."""

    target: ServiceTarget
    draw: int = 0  # of arrivals
    speed: float = 1.0  # times the rate
    prompts: float = 1.0  # times their lengths
    answers: float = 1.0
    step_factor: float = 1.0  # times what steps take


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """What became of a load on a layout."""

    layout: Layout
    rate: float  # requests a second that came
    ttft_p50_ms: float
    ttft_p90_ms: float
    itl_p50_ms: float
    itl_p90_ms: float
    goodput_per_s: float  # requests within the target
    good_share: float
    tokens_per_s: float
    is_held: bool

    @classmethod
    def of(cls, layout: Layout, outcome: Outcome, target: ServiceTarget, arrival_s: float) -> LayoutFigures:
        total = len(outcome.ttft_s) + outcome.num_refused
        share = outcome.num_good / max(total, 1)
        rate = total / max(arrival_s, 1e-9)
        return cls(
            layout, rate,
            percentile_ms(outcome.ttft_s, 50), percentile_ms(outcome.ttft_s, 90),
            percentile_ms(outcome.itl_s, 50), percentile_ms(outcome.itl_s, 90),
            share * rate, share, outcome.num_output_tokens / max(outcome.duration_s, 1e-9), share >= target.share,
        )  # fmt: skip

    def merit(self, target: ServiceTarget) -> tuple[float, float]:
        """Return what is larger for what serves the target better: who is late counts before how late."""
        lateness = self.ttft_p90_ms / target.ttft_ms + self.itl_p90_ms / target.itl_ms
        return min(round(self.good_share, 3), target.share), -lateness


@dataclass(slots=True)
class Bench:
    """Simulates layouts, each question once, until its time is over."""

    loads: Loads
    settings: Mapping[Way, ClusterSettings]
    until: float = math.inf  # by `clock`
    clock: Callable[[], float] = time.monotonic
    show: Callable[[Layout], None] = lambda layout: None
    num_runs: int = 0
    _known: dict[tuple[Layout, Question], LayoutFigures] = field(default_factory=dict)

    def ask(self, layout: Layout, question: Question) -> LayoutFigures:
        """Raises OutOfTimeError."""
        if (known := self._known.get((layout, question))) is None:
            known = self._known[layout, question] = self.run(self.settings[layout.way], layout, question)
        return known

    def run(self, settings: ClusterSettings, layout: Layout, question: Question) -> LayoutFigures:
        """Raises OutOfTimeError."""
        requests = self.loads(question.draw, question.speed)
        size = settings.decode.tokens_per_block
        requests = scaled(requests, question.prompts, question.answers, size)
        engines = {
            stage: replace(engine, times=engine.times.scaled(question.step_factor))
            for stage, engine in (("prefill", settings.prefill), ("decode", settings.decode))
        }
        target = question.target
        settings = replace(
            settings, num_prefill=layout.prefill, num_decode=layout.decode, prefill=engines["prefill"],
            decode=engines["decode"], ttft_s=target.ttft_ms / 1e3, itl_s=target.itl_ms / 1e3, seed=question.draw,
        )  # fmt: skip
        outcome = simulate(requests, "kv", settings, lambda done: self._go_on(layout))
        self.num_runs += 1
        return LayoutFigures.of(layout, outcome, target, requests[-1].arrival_s - requests[0].arrival_s)

    def _go_on(self, layout: Layout) -> None:
        self.show(layout)
        if self.clock() > self.until:
            raise OutOfTimeError

    @property
    def tried(self) -> Mapping[tuple[Layout, Question], LayoutFigures]:
        return self._known


def fewest(bench: Bench, question: Question, way: Way, least: int, most: int) -> LayoutFigures | None:
    """Return the smallest layout that holds the target, else the best of `most` GPUs. None: they are too few."""
    low, high = max(least, 1 if way == "aggregated" else 2), most
    if high < low:
        return None
    found = best_of(bench, question, way, high)
    while found.is_held and low < found.layout.gpus:
        middle = (low + found.layout.gpus) // 2
        tried = best_of(bench, question, way, middle)
        if tried.is_held:
            found = tried
        else:
            low = middle + 1
    return found


def best_of(bench: Bench, question: Question, way: Way, gpus: int) -> LayoutFigures:
    """Return what serves best with all of so many GPUs; prefill's number is climbed to from an estimate."""
    if way == "aggregated":
        return bench.ask(Layout(0, gpus), question)
    start = min(max(round(gpus * _prefill_share(bench, question)), 1), gpus - 1)
    best = bench.ask(Layout(start, gpus - start), question)
    for direction in (1, -1):
        while 0 < (prefill := best.layout.prefill + direction) < gpus:
            tried = bench.ask(Layout(prefill, gpus - prefill), question)
            if tried.merit(question.target) <= best.merit(question.target):
                break
            best = tried
    return best


def capacity(bench: Bench, question: Question, layout: Layout, start: float = 1.0) -> float:
    """Return how many times the rate may be what it is until the target is lost, MOST_SPEED at most; 0: never held."""

    def is_held(speed: float) -> bool:
        return bench.ask(layout, replace(question, speed=question.speed * speed)).is_held

    low, step = start, 1.3
    if is_held(start):
        while is_held(high := low * step):
            low, step = high, step * 1.3
            if low >= MOST_SPEED:
                return MOST_SPEED
    else:
        high = start
        while not is_held(low := high / step):
            high, step = low, step * 1.3
            if high < 1 / MOST_SPEED:
                return 0.0
    while high / low > _NEAR:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_held(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Range:
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(min(values), max(values))

    def text(self, form: str) -> str:
        low, high = format(self.low, form), format(self.high, form)
        return low if low == high else f"{low} to {high}"


class Reason(enum.StrEnum):
    """Why a layout is taken, or what of two ways on as many GPUs."""

    ONLY = enum.auto()  # one GPU is enough: the other way needs two
    FEWER = enum.auto()  # the other way does not hold the target on so few GPUs
    MORE = enum.auto()  # it holds the target up to a higher rate
    EQUAL = enum.auto()  # both hold it up to about the same rate
    CLOSE = enum.auto()  # which one is better hangs on the error of the step times
    NONE = enum.auto()  # no layout holds the target


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """What is taken, and how both ways compare on as many GPUs."""

    best: LayoutFigures
    other: LayoutFigures | None  # the best of the other way on as many GPUs; None: it needs more than there are
    rates: Mapping[Way, Range]  # requests a second up to which each holds the target
    ratio: Range | None  # of the chosen way's to the other's: draw by draw, and over the error of the step times
    reason: Reason

    @property
    def is_apart(self) -> bool:
        return self.best.layout.way == "apart"


def choose(bench: Bench, question: Question, least: int, most: int, draws: int = 1, error: float = 0.0) -> LayoutChoice:
    """Seek from so many GPUs to so many. `error`: of the step times, relative. Raises OutOfTimeError."""
    found = [one for way in WAYS if (one := fewest(bench, question, way, least, most)) is not None]
    held = [one for one in found if one.is_held]
    gpus = min((one.layout.gpus for one in held), default=most)
    together = best_of(bench, question, "aggregated", gpus)
    if gpus > 1:
        pair: dict[Way, LayoutFigures] = {"aggregated": together, "apart": best_of(bench, question, "apart", gpus)}
        return _compared(bench, question, pair, draws, error)
    rates = Range.of([together.rate * speed for speed in _capacities(bench, question, together.layout, draws)])
    return LayoutChoice(together, None, {"aggregated": rates}, None, Reason.ONLY if together.is_held else Reason.NONE)


def _compared(
    bench: Bench, question: Question, pair: Mapping[Way, LayoutFigures], draws: int, error: float
) -> LayoutChoice:
    drawn = {way: _capacities(bench, question, one.layout, draws) for way, one in pair.items()}
    ratios = _ratios(drawn["apart"], drawn["aggregated"])
    taken, reason = _verdict(pair, ratios)
    if error and reason in (Reason.FEWER, Reason.MORE):
        speeds = {
            way: _within_error(bench, question, pair[way].layout, several, error) for way, several in drawn.items()
        }
        ratios = _over(speeds["apart"], speeds["aggregated"])
        if ratios.low <= 1 <= ratios.high:
            taken, reason = ("aggregated" if pair["aggregated"].is_held else "apart"), Reason.CLOSE
    else:
        speeds = {way: Range.of(several) for way, several in drawn.items()}
    rates = {way: Range(speed.low * pair[way].rate, speed.high * pair[way].rate) for way, speed in speeds.items()}
    if taken == "apart":
        return LayoutChoice(pair["apart"], pair["aggregated"], rates, ratios, reason)
    ratio = Range(_inverse(ratios.high), _inverse(ratios.low))
    return LayoutChoice(pair["aggregated"], pair["apart"], rates, ratio, reason)


def _within_error(bench: Bench, question: Question, layout: Layout, drawn: Sequence[float], error: float) -> Range:
    """Return the capacity over draws, and where steps take so much less or more than the table says."""
    found = [
        capacity(bench, replace(question, step_factor=factor), layout, drawn[0] or 1.0)
        for factor in (1 - error, 1 + error)
    ]
    return Range.of([*drawn, *found])


def _over(speed: Range, other: Range) -> Range:
    """Return the first over the second, each wherever it may be: what one way's steps lack the other's may have."""
    return Range(_ratio(speed.low, other.high), _ratio(speed.high, other.low))


def _ratios(speeds: Sequence[float], others: Sequence[float]) -> Range:
    """Return the first over the second, draw by draw."""
    return Range.of(list(map(_ratio, speeds, others)))


def _ratio(speed: float, other: float) -> float:
    """Return the first over the second; 1 where neither ever holds the target."""
    return speed * _inverse(other) if speed or other else 1.0


def _verdict(pair: Mapping[Way, LayoutFigures], ratios: Range) -> tuple[Way, Reason]:
    """Prefill apart must be better in every draw: it has more parts."""
    apart, together = pair["apart"].is_held, pair["aggregated"].is_held
    is_more, is_less = ratios.low > 1 + EQUAL_WITHIN, ratios.high < 1 / (1 + EQUAL_WITHIN)
    if not apart and not together:
        return ("apart" if is_more else "aggregated"), Reason.NONE
    if apart != together:
        return ("apart" if apart else "aggregated"), Reason.FEWER
    if is_more:
        return "apart", Reason.MORE
    return "aggregated", Reason.MORE if is_less else Reason.EQUAL


def _capacities(bench: Bench, question: Question, layout: Layout, draws: int) -> list[float]:
    found = [capacity(bench, question, layout)]
    for draw in range(1, draws):
        found.append(capacity(bench, replace(question, draw=draw), layout, found[0] or 1.0))
    return found


def _inverse(value: float) -> float:
    return 1 / value if value else math.inf


@dataclass(frozen=True, slots=True)
class Expected:
    """Ranges over draws of arrivals, and over the error of the step times."""

    ttft_p50_ms: Range
    ttft_p90_ms: Range
    itl_p50_ms: Range
    itl_p90_ms: Range
    goodput_per_s: Range
    good_share: Range
    tokens_per_s: Range
    is_always_held: bool


def expect(bench: Bench, question: Question, layout: Layout, draws: int, error: float) -> Expected:
    """Raises OutOfTimeError."""
    questions = [replace(question, draw=draw) for draw in range(draws)]
    questions += [replace(question, step_factor=factor) for factor in (1 - error, 1 + error) if error]
    found = [bench.ask(layout, one) for one in questions]
    names = (
        *("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p90_ms"),
        *("goodput_per_s", "good_share", "tokens_per_s"),
    )
    ranges: dict[str, Any] = {name: Range.of([getattr(one, name) for one in found]) for name in names}
    return Expected(**ranges, is_always_held=all(one.is_held for one in found))


def neighbors(question: Question) -> dict[str, Question]:
    """Return what might be otherwise."""
    target = question.target
    return {
        "twice the rate": replace(question, speed=2 * question.speed),
        "half the rate": replace(question, speed=question.speed / 2),
        "prompts half as long": replace(question, prompts=question.prompts / 2),
        "prompts twice as long": replace(question, prompts=question.prompts * 2),
        "answers half as long": replace(question, answers=question.answers / 2),
        "half the TTFT": replace(question, target=replace(target, ttft_ms=target.ttft_ms / 2)),
        "half the ITL": replace(question, target=replace(target, itl_ms=target.itl_ms / 2)),
    }


# Loads


def scaled(
    requests: Sequence[SimulatedRequest], prompts: float, answers: float, tokens_per_block: int
) -> Sequence[SimulatedRequest]:
    """Make prompts and answers so many times as long: what is added to a prompt is new, what is cut was its end."""
    if prompts == answers == 1:
        return requests
    found = []
    for number, one in enumerate(requests):
        num_prompt = max(round(one.num_prompt * prompts), 1)
        blocks = one.blocks[: num_prompt // tokens_per_block]
        missing = num_prompt // tokens_per_block - len(blocks)
        if missing:
            first = (number + 1) << 24
            blocks = np.concatenate([blocks, spread(np.arange(first, first + missing, dtype=np.uint64))])
        num_output = max(round(one.num_output * answers), 1)
        found.append(replace(one, num_prompt=num_prompt, num_output=num_output, blocks=blocks))
    return found


def loads_of_lengths(
    prompt: float, answer: float, variation: float, rate: float, num_requests: int, prefix: int = 0
) -> Loads:
    """Return Poisson arrivals of lognormal lengths; `prefix`: tokens with which all prompts begin."""

    def make(draw: int, speed: float) -> Sequence[SimulatedRequest]:
        random = np.random.default_rng(draw)
        count = _count(num_requests, rate * speed)
        drawn = np.cumsum(random.exponential(1.0, count))
        arrivals = (drawn * (count / (rate * speed) / drawn[-1])).tolist()  # its mean is the rate
        prompts, answers = (_lengths(random, mean, variation, count) for mean in (prompt, answer))
        fresh, common = 1 << 20, list(range(prefix // TOKENS_PER_BLOCK))
        found = []
        for at, num_prompt, num_output in zip(arrivals, prompts, answers, strict=True):
            num_blocks = num_prompt // TOKENS_PER_BLOCK
            own = range(fresh, fresh + max(num_blocks - len(common), 0))
            fresh = own.stop
            blocks = spread(np.array([*common[:num_blocks], *own], np.uint64))
            found.append(SimulatedRequest(at, num_prompt, num_output, blocks))
        return found

    return make


def loads_of_trace(trace: Trace, num_requests: int) -> Loads:
    """Return the busiest stretch. Draw 0 is as recorded; others come at other times of the same minutes, in order."""

    def make(draw: int, speed: float) -> Sequence[SimulatedRequest]:
        requests = trace.requests
        count = _count(num_requests, speed * len(requests) / max(requests[-1].arrival_s, 1e-9))
        requests = faster(busiest(requests, count), speed)
        if not draw:
            return requests
        random = np.random.default_rng(draw)
        at = np.array([one.arrival_s for one in requests])
        begins = at // _RECUT_S * _RECUT_S
        ends = np.minimum(begins + _RECUT_S, at[-1])
        drawn = np.sort(random.uniform(begins, np.maximum(ends, begins))).tolist()
        return [replace(one, arrival_s=arrival_s) for one, arrival_s in zip(requests, drawn, strict=True)]

    return make


def busiest(requests: Sequence[SimulatedRequest], count: int) -> list[SimulatedRequest]:
    """Return so many requests that came in the shortest time, from 0 on."""
    count = min(count, len(requests))
    at = np.array([one.arrival_s for one in requests])
    first = int((at[count - 1 :] - at[: len(at) - count + 1]).argmin())
    begin_s = requests[first].arrival_s
    return [replace(one, arrival_s=one.arrival_s - begin_s) for one in requests[first : first + count]]


def _count(num_requests: int, rate: float) -> int:
    return min(max(num_requests, math.ceil(rate * _LEAST_S)), max(num_requests, MOST_REQUESTS))


def _lengths(random: np.random.Generator, mean: float, variation: float, count: int) -> list[int]:
    sigma = math.sqrt(math.log1p(variation**2))
    drawn = random.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return [max(round(one), 1) for one in np.minimum(drawn, 8 * mean).tolist()]


def _prefill_share(bench: Bench, question: Question) -> float:
    """Estimate prefill's part of all work, decode with 32 rows at once."""
    requests, times = bench.loads(0, 1.0)[:200], bench.settings["apart"].decode.times
    prompt = question.prompts * sum(one.num_prompt for one in requests) / len(requests)
    answer = question.answers * sum(one.num_output for one in requests) / len(requests)
    computing = times.step_ms(0, round(prompt), 0, 1)
    answering = answer * times.step_ms(32, 0, round(32 * (prompt + answer / 2))) / 32
    return computing / (computing + answering)


def constants_of(times: StepTimes, rows: int, prompt: int, context: int, hop_ms: float | None) -> dict[str, float]:
    """Return the router's prices for a prompt beside so many rows. Without a hop transfer_ms is not known."""
    beside = rows * context
    added_ms = times.step_ms(rows, prompt, beside, 1) - times.step_ms(rows, 0, beside)
    transfer = times.table.transfer
    found = {"prefill_ms_per_token": float(f"{added_ms / prompt:.3g}")}
    if transfer.bytes_per_s:
        found["transfer_ms_per_token"] = float(f"{1e3 * transfer.bytes_per_token / transfer.bytes_per_s:.3g}")
    if hop_ms is not None and (own := hop_ms + transfer.start_ms):
        found["transfer_ms"] = float(f"{own:.3g}")
    return found
