"""Observations of a deployment that runs: differences of its metrics between two looks, and what to doubt in them.

Requests are those that ended at entries, and what is under way beyond the last look's. Lengths are those of decode's
prompts and answers; what caches had of prompts is told apart. TTFT and gaps are as entries measured them.
Shares that missed a target are those above the bucket's bound that is next to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from bireme.config import stage_of
from bireme.errors import BiremeError
from bireme.planner.observation import MOST_CLOCKS_APART_S, Observation, StageObservation
from bireme.scaling.connector import STAGES, Connector, Sizes, SourcePage, StageSize
from bireme.scaling.missed_targets import missed_share
from bireme.scaling.page_figures import MEAN_GAP, TOTALS, TTFT, PageFigures, WorkerLevels, page_figures

_LATE = 2.0  # intervals between two looks that are too many for one
_INEXACT = 0.05  # of a share: what may be so far from the truth is told


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True)
class _Look:
    at_s: float  # Unix time
    clock_s: float  # of a clock that nobody sets
    sizes: Sizes
    pages: Mapping[str, PageFigures]  # by source

    def workers(self, stage: str) -> list[WorkerLevels]:
        return [one for name, one in self.named_workers().items() if stage_of(name.partition(" ")[0]) == stage]

    def named_workers(self) -> dict[str, WorkerLevels]:
        """By worker and source: each launch has a worker called decode."""
        return {f"{name} {source}": one for source, page in self.pages.items() for name, one in page.workers.items()}


class LiveObserver:
    """One call at a time. What can't be believed stands in the observation's `doubt`."""

    def __init__(
        self,
        connector: Connector,
        interval_s: float,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        stages: Sequence[str] = STAGES,
    ) -> None:
        """`stages`: that there are; without prefill, decode computes prompts."""
        self._connector, self._interval_s, self._now, self._clock = connector, interval_s, now, clock
        self.stages = stages
        self._last: _Look | None = None
        self.sizes: Sizes | None = None  # of the last look; None: they could not be told
        self.inexact: list[str] = []  # what of the last observation buckets are too wide for
        self._num_unlike = 0  # looks in a row at which sizes and metrics contradicted each other

    def observe(self, targets: Targets | None = None) -> Observation:
        """`targets`: of whose misses shares are asked for; None: they are not."""
        began_at = self._now()
        self.sizes, self.inexact = None, []
        try:
            sizes = self.sizes = self._connector.sizes()
            pages = self._connector.pages()
        except BiremeError as error:
            return self._doubtful(self._now(), f"missing: {error}")
        now, clock_s = self._now(), self._clock()
        if doubt := _clocks_apart(began_at, now, pages):
            return self._doubtful(now, doubt)
        try:
            figures = {page.source: page_figures(page.text) for page in pages}
        except ValueError as error:
            return self._doubtful(now, f"absurd: a metrics page has {error}")
        if doubt := _absurd(figures):
            return self._doubtful(now, doubt)
        look = _Look(now, clock_s, sizes, figures)
        last, self._last = self._last, look
        if last is None:
            return self._doubtful(now, "gap: the first look, so nothing is known of an interval")
        found = replace(_observation(last, look, self.stages), doubt=self._doubt(last, look))
        return found if targets is None or found.doubt else self._with_shares(found, last, look, targets)

    def engines(self) -> dict[str, WorkerLevels]:
        """Return what a worker of each stage told at the last look; without those that did not."""
        last = self._last
        found = {stage: last.workers(stage) for stage in self.stages} if last is not None else {}
        return {stage: one for stage, workers in found.items() if (one := next(filter(_tells_all, workers), None))}

    def unplanned(self) -> list[str]:
        """Return stages beyond those that there are, of which the last look has workers, asleep or not."""
        last = self._last
        others = [stage for stage in STAGES if stage not in self.stages] if last is not None else []
        return [stage for stage in others if last and any(one.up is not None for one in last.workers(stage))]

    def _with_shares(self, found: Observation, last: _Look, look: _Look, targets: Targets) -> Observation:
        """Where no bucket ends at a target, with what certainly missed it."""
        shares, grown = dict[str, float | None](), _grown(last, look)
        asked = {
            "late_share": (TTFT, targets.ttft_ms, grown["num_ttft"]),
            "slow_share": (MEAN_GAP, targets.itl_ms, min(grown["num_gaps"], grown["ended"])),
        }
        for name, (histogram, target_ms, count) in asked.items():
            if count > 0 and all(histogram not in page.buckets for page in look.pages.values()):
                return replace(found, doubt=f"missing: {histogram}_bucket of entries, by which {name} is told")
            share = missed_share(_grown_buckets(last, look, histogram), target_ms / 1e3)
            shares[name] = share.least if share is not None else None
            if share is not None and share.most - share.least > _INEXACT:
                self.inexact.append(
                    f"{name} {share.least:.0%} to {share.most:.0%}: no bucket of {histogram} ends at {target_ms:g} ms"
                    " (metrics.buckets)"
                )
        return replace(found, late_share=shares["late_share"], slow_share=shares["slow_share"])

    def _doubt(self, last: _Look, look: _Look) -> str:
        """Return the first reason not to believe the difference of two looks; "": there is none."""
        return (
            _moved_clock(last, look)
            or self._gap(last, look)
            or _began_anew(last, look)
            or _frozen(last, look)
            or self._contradiction(look)
        )

    def _gap(self, last: _Look, look: _Look) -> str:
        seconds = look.clock_s - last.clock_s
        if seconds <= _LATE * self._interval_s:
            return ""
        return f"gap: {seconds:.0f} s since the look before, {self._interval_s:.0f} are usual"

    def _contradiction(self, look: _Look) -> str:
        """Sizes and metrics are read one after the other, so once they may differ."""
        unlike = []
        for stage in STAGES:
            told, up = look.sizes[stage].num_ready, sum(one.is_up for one in look.workers(stage))
            if told > up:
                unlike.append(f"{told} {stage} workers are ready, by metrics {up} are up")
        self._num_unlike = self._num_unlike + 1 if unlike else 0
        return f"contradictory: {'; '.join(unlike)}" if self._num_unlike > 1 else ""

    def _doubtful(self, now: float, doubt: str) -> Observation:
        sizes = self.sizes
        stages = {stage: _of_size(sizes[stage]) if sizes is not None else None for stage in STAGES}
        return Observation(
            at_s=now, interval_s=self._interval_s, num_requests=None, prompt_tokens=None, output_tokens=None,
            ttft_ms=None, itl_ms=None, prefill=stages["prefill"], decode=stages["decode"], doubt=doubt,
        )  # fmt: skip


def _observation(last: _Look, look: _Look, stages: Sequence[str]) -> Observation:
    grown = _grown(last, look)
    arrived = grown["ended"] + sum(page.active for page in look.pages.values())
    arrived -= sum(page.active for page in last.pages.values())
    num_requests = max(arrived, grown["num_prompts"], 0.0)  # clients may call decode itself, past all entries
    cached = grown["cached_tokens" if "prefill" in stages else "decode_cached_tokens"]
    computed = max(grown["prompt_tokens"] - cached, 0.0)
    return Observation(
        at_s=look.at_s,
        interval_s=max(look.clock_s - last.clock_s, 1e-3),
        num_requests=round(num_requests),
        prompt_tokens=_mean(computed, grown["num_prompts"]),
        cached_tokens=_mean(grown["prompt_tokens"] - computed, grown["num_prompts"]),
        output_tokens=_mean(grown["output_tokens"], grown["num_prompts"]),
        ttft_ms=_mean(1e3 * grown["ttft_s"], grown["num_ttft"]),
        itl_ms=_mean(1e3 * grown["gaps_s"], grown["num_gaps"]),
        prefill=_stage(look, "prefill"),
        decode=_stage(look, "decode"),
    )


def _grown(last: _Look, look: _Look) -> dict[str, float]:
    """Return how much totals grew. A source that is new began in this interval, or was out of reach: it counts next."""
    known = [(last.pages[source], page) for source, page in look.pages.items() if source in last.pages]
    return {name: sum(page.totals[name] - before.totals[name] for before, page in known) for name in TOTALS}


def _grown_buckets(last: _Look, look: _Look, histogram: str) -> dict[float, float]:
    """As `_grown`; a source's bucket that is new has grown from 0."""
    found: dict[float, float] = {}
    for source, page in look.pages.items():
        if source in last.pages:
            before = last.pages[source].buckets.get(histogram, {})
            for bound, count in page.buckets.get(histogram, {}).items():
                found[bound] = found.get(bound, 0.0) + count - before.get(bound, 0.0)
    return found


def _stage(look: _Look, stage: str) -> StageObservation:
    size, workers = look.sizes[stage], look.workers(stage)
    waiting = _total(one.waiting for one in workers)
    if stage == "decode" and not size.num_ready:  # entries keep them
        waiting += sum(page.active for page in look.pages.values())
    usage = [one.kv_usage for one in workers if one.is_up and one.kv_usage is not None]
    return replace(
        _of_size(size),
        num_waiting=round(waiting),
        num_running=round(_total(one.running for one in workers)),
        kv_usage=sum(usage) / len(usage) if usage else 0.0,
    )


def _total(values: Iterable[float | None]) -> float:
    return sum(filter(None, values), 0.0)


def _of_size(size: StageSize) -> StageObservation:
    return StageObservation(size.num_ready, size.num_starting)


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def _tells_all(one: WorkerLevels) -> bool:
    """Of a worker that sleeps all are 0, and of one whose series have just been made."""
    return all((one.max_num_tokens, one.max_batch_size, one.kv_blocks, one.block_tokens))


def _clocks_apart(began_at: float, now: float, pages: Sequence[SourcePage]) -> str:
    """A page was written between the look's beginning and its end, which may be far apart where doors are slow."""
    for page in pages:
        ahead_s = 0.0
        if page.at_s is not None and not began_at <= page.at_s <= now:
            ahead_s = page.at_s - (now if page.at_s > now else began_at)
        if not abs(ahead_s) <= MOST_CLOCKS_APART_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            return f"clocks apart: {page.source} is {abs(ahead_s):.0f} s {way} this host"
    return ""


def _absurd(pages: Mapping[str, PageFigures]) -> str:
    for source, page in pages.items():
        told = {**page.totals, "active": page.active}
        for worker, one in page.workers.items():
            told |= {f"{worker} {name}": value for name, value in asdict(one).items() if value is not None}
        for name, value in told.items():
            if not 0 <= value < math.inf:
                return f"absurd: {source} tells {name} {value:g}"
    return ""


def _moved_clock(last: _Look, look: _Look) -> str:
    moved_s = (look.at_s - last.at_s) - (look.clock_s - last.clock_s)
    if abs(moved_s) <= MOST_CLOCKS_APART_S:
        return ""
    return f"clocks apart: this host's clock was set by {moved_s:+.0f} s"


def _began_anew(last: _Look, look: _Look) -> str:
    for source, page in look.pages.items():
        before = last.pages.get(source)
        fell = [name for name in TOTALS if before is not None and page.totals[name] < before.totals[name]]
        if fell:
            return f"gap: counters of {source} began anew ({fell[0]}), as after a restart"
    return ""


def _frozen(last: _Look, look: _Look) -> str:
    """An engine that works has made steps."""
    before = last.named_workers()
    for name, one in look.named_workers().items():
        then = before.get(name)
        if then is None or not (one.is_up and then.is_up and one.running and then.running):
            continue
        if one.steps is not None and one.steps == then.steps:
            seconds = look.clock_s - last.clock_s
            return f"stale: {name} has {one.running:.0f} requests and told no step for {seconds:.0f} s"
    return ""
