"""What an engine's step costs by what it computes, from a table of measured points.

    {"format": "bireme.step_times.v1", "engine": "torch", "machine": "H100 80GB", "points": [
        {"decode_rows": 32, "prefill_tokens": 0, "context_tokens": 32000, "ms": 7.5}, ...]}

`context_tokens` are tokens whose KV the step reads, of all its rows. Between the points this rule holds, fitted to them
by relative least squares without a negative term:

    ms = least + rows(decode rows) + tokens(prefill tokens) + a x context + b x prompts that begin
       + c x prefill tokens x context of their prompt + d if it both decodes and prefills

`rows` and `tokens` are lines from point to point, and go on beyond the last with its slope.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from bireme.config import MockerConfig
from bireme.errors import ConfigError
from bireme.kv.wire.step_records import StepRecord
from bireme.settings import Duration, NotNegative, Positive

FORMAT = "bireme.step_times.v1"
MAX_POINTS = 100_000
_DATA = Path(__file__).with_name("data")
_APART = 1.5  # bends of a line
_BINS_PER_OCTAVE = 4
_ELSEWHERE = 0.1  # by which steps of another machine of that kind, with a server beside, take longer (docs/sizing.md)
_FEW = 3  # records that are needed for a point
Columns = npt.NDArray[np.float64]


class StepPoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    decode_rows: NotNegative
    prefill_tokens: NotNegative
    context_tokens: NotNegative
    ms: Duration
    steps: Positive = 1  # of which this is the median
    prompts: NotNegative = 0  # of which this step computes the beginning
    # Of the context, what prompts read; None: all where nothing decodes, else nothing
    prefill_context_tokens: NotNegative | None = None

    @property
    def tokens_times_context(self) -> float:
        """Of its prompts, taken to be alike."""
        context = self.prefill_context_tokens
        if context is None:
            context = 0 if self.decode_rows else self.context_tokens
        return self.prefill_tokens * context / max(self.prompts, 1)


class TransferTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """KV of a prompt from prefill to decode."""

    start_ms: Duration = 0.0
    bytes_per_token: NotNegative = 0
    bytes_per_s: Duration = 0.0  # 0: only the start takes time

    def seconds(self, num_tokens: int) -> float:
        copy_s = num_tokens * self.bytes_per_token / self.bytes_per_s if self.bytes_per_s else 0.0
        return self.start_ms / 1e3 + copy_s


NO_TRANSFER = TransferTimes()


class StepTable(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of step times. Fields that are not known here are left out."""

    format: str
    engine: str
    machine: str
    points: list[StepPoint]
    source: str = ""  # where its figures come from
    plan_ahead_ms: Duration = 0.0  # a step is planned so long before the one under way ends: who comes later misses it
    transfer: TransferTimes = NO_TRANSFER


@dataclass(frozen=True, slots=True)
class Line:
    """Straight from knot to knot, from (0, 0) on."""

    knots: tuple[float, ...]  # ends of its pieces
    slopes: tuple[float, ...]  # of each; the last goes on
    heights: tuple[float, ...]  # at the begin of each

    @classmethod
    def of(cls, knots: Sequence[float], slopes: Sequence[float]) -> Line:
        begins, heights = [0.0, *knots], [0.0]
        for at in range(len(slopes) - 1):
            heights.append(heights[-1] + slopes[at] * (begins[at + 1] - begins[at]))
        return cls(tuple(knots), tuple(slopes), tuple(heights))

    def __call__(self, value: float) -> float:
        if not self.knots:
            return 0.0
        at = min(bisect.bisect_left(self.knots, value), len(self.knots) - 1)
        return self.heights[at] + self.slopes[at] * (value - (self.knots[at - 1] if at else 0.0))

    def scaled(self, factor: float) -> Line:
        return Line.of(self.knots, [slope * factor for slope in self.slopes])


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The rule that a table follows. Milliseconds."""

    table: StepTable
    least_ms: float
    rows: Line
    tokens: Line
    ms_per_context_token: float
    ms_per_prompt: float
    ms_per_token_and_context: float
    ms_of_both: float
    error: float  # relative, median of the points' differences from the rule; a published table's is no less than 0.1

    def step_ms(
        self, rows: int, tokens: int = 0, context: int = 0, prompts: int = 0, tokens_times_context: float = 0.0
    ) -> float:
        """`context`: that decoding rows read. `tokens_times_context`: of prompts, the sum of each one's product."""
        ms = self.least_ms + self.rows(rows) + self.ms_per_context_token * context
        if not tokens:
            return ms
        ms += self.tokens(tokens) + self.ms_per_prompt * prompts + self.ms_per_token_and_context * tokens_times_context
        return ms + self.ms_of_both if rows else ms

    def scaled(self, factor: float) -> StepTimes:
        """Return steps that take so many times as long."""
        terms = ("least_ms", "ms_per_context_token", "ms_per_prompt", "ms_per_token_and_context", "ms_of_both")
        changes: dict[str, Any] = {name: getattr(self, name) * factor for name in terms}
        return replace(self, rows=self.rows.scaled(factor), tokens=self.tokens.scaled(factor), **changes)

    @classmethod
    def of(cls, table: StepTable) -> StepTimes:
        """Raises ConfigError for a table that says too little."""
        points = [point for point in table.points if point.decode_rows or point.prefill_tokens]
        if table.format != FORMAT:
            raise ConfigError(f"format: {table.format[:60]!r}; {FORMAT} is read")
        if not 2 <= len(points) <= MAX_POINTS:
            raise ConfigError(f"points: {len(points)} with work; 2 to {MAX_POINTS:,} are needed")
        if not all(0 < point.ms < math.inf for point in points):
            raise ConfigError("points: ms of a step with work is more than 0")
        return _fitted(table, points)

    @classmethod
    def of_mocker(cls, config: MockerConfig, transfer: TransferTimes = NO_TRANSFER) -> StepTimes:
        """Return exactly what the mocker's steps take."""
        return cls(
            StepTable(format=FORMAT, engine="mocker", machine="any", points=[], transfer=transfer),
            config.step_ms,
            Line.of([1.0], [config.step_ms_per_request]),
            Line.of([1.0], [config.prefill_ms_per_token]),
            0.0, config.prefill_ms, 0.0, 0.0, 0.0,
        )  # fmt: skip

    @classmethod
    def of_records(cls, lines: Iterable[bytes], engine: str, machine: str, source: str = "") -> StepTimes:
        """Fit what tools/record_steps.py has written: medians of alike steps. Raises ConfigError naming a line."""
        points = list[StepPoint]()
        for number, line in enumerate(lines, 1):
            try:
                point = _point_of(_decode_record(line))
            except msgspec.DecodeError as error:
                raise ConfigError(f"line {number}: no step record ({error}); see tools/record_steps.py") from error
            if point is not None:
                points.append(point)
        return cls.of(table_of_points(points, engine, machine, source))

    @classmethod
    def read(cls, name: str) -> StepTimes:
        """Read a published table by its name, else a file. Raises ConfigError."""
        is_published = name in published()
        path = _DATA / f"{name}.json" if is_published else Path(name)
        try:
            found = cls.of(msgspec.json.decode(path.read_bytes(), type=StepTable))
            return replace(found, error=max(found.error, _ELSEWHERE)) if is_published else found
        except OSError as error:
            raise ConfigError(f"{name}: {error.strerror}; a file, or one of {', '.join(published())}") from error
        except msgspec.DecodeError as error:
            remedy = "tools/record_steps.py --fit makes one of the records that it has written"
            raise ConfigError(f"{path}: no table of step times ({error}); {remedy}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def write(self, path: Path) -> None:
        """Write a line a point."""
        encode = msgspec.json.encode
        head = encode(msgspec.structs.replace(self.table, points=[])).replace(b',"points":[]', b"")
        points = b",\n  ".join(map(encode, self.table.points))
        path.write_bytes(head[:-1] + b',\n"points": [\n  ' + points + b"\n]}\n")


def table_of_points(points: Iterable[StepPoint], engine: str, machine: str, source: str) -> StepTable:
    """Return medians of alike points; what was seen less than three times is left out."""
    bins: defaultdict[tuple[int, ...], list[StepPoint]] = defaultdict(list)
    for point in points:
        bins[_bin_of(point)].append(point)
    medians = [_median(alike) for alike in bins.values() if len(alike) >= _FEW]
    return StepTable(format=FORMAT, engine=engine, machine=machine, points=medians, source=source)


def published() -> list[str]:
    """Return the names of the tables that come with the package."""
    return sorted(path.stem for path in _DATA.glob("*.json"))


def _fitted(table: StepTable, points: Sequence[StepPoint]) -> StepTimes:
    rows, tokens = (_column(points, name) for name in ("decode_rows", "prefill_tokens"))
    row_knots, token_knots = _knots(rows), _knots(tokens)
    design = np.column_stack(
        [
            np.ones(len(points)),
            *_pieces(rows, row_knots),
            *_pieces(tokens, token_knots),
            _column(points, "context_tokens"),
            _column(points, "prompts") * (tokens > 0),
            _column(points, "tokens_times_context"),
            (rows > 0) & (tokens > 0),
        ]
    )
    times = _column(points, "ms")
    weights = np.sqrt(_column(points, "steps"))
    terms = least_squares(design * (weights / times)[:, None], weights)
    error = float(np.median(np.abs(design @ terms / times - 1.0)))
    least, *slopes = terms.tolist()
    num_rows, num_tokens = len(row_knots), len(token_knots)
    per_context, per_prompt, per_product, both = slopes[num_rows + num_tokens :]
    return StepTimes(
        table, least,
        Line.of(row_knots, slopes[:num_rows]),
        Line.of(token_knots, slopes[num_rows : num_rows + num_tokens]),
        per_context, per_prompt, per_product, both, error,
    )  # fmt: skip


def _column(points: Sequence[StepPoint], name: str) -> Columns:
    return np.array([getattr(point, name) for point in points], float)


def _knots(values: Columns) -> list[float]:
    """Return where the line may bend: each at least half as much again as the one before, and the largest."""
    distinct: list[float] = np.unique(values[values > 0]).tolist()
    found: list[float] = []
    for value in distinct[:-1]:
        if value >= _APART * (found[-1] if found else 0.0) and _APART * value <= distinct[-1]:
            found.append(value)
    return found + distinct[-1:]


def _pieces(values: Columns, knots: Sequence[float]) -> Iterable[Columns]:
    """Yield how much of each value lies in each piece; the last has no end."""
    for begin, end in zip([0.0, *knots], [*knots[:-1], math.inf], strict=False):
        yield np.clip(values, begin, end) - begin


def least_squares(design: Columns, target: Columns) -> Columns:
    """Return the terms, none negative, whose sum is nearest to the target (Lawson and Hanson)."""
    scale = np.maximum(np.linalg.norm(design, axis=0), 1e-300)
    scaled = design / scale
    terms, is_used = np.zeros(design.shape[1]), np.zeros(design.shape[1], bool)
    for _ in range(10 * design.shape[1]):
        pulls = np.where(is_used, -np.inf, scaled.T @ (target - scaled @ terms))
        if pulls.max() <= 1e-10:
            break
        is_used[pulls.argmax()] = True
        while True:
            found = np.zeros_like(terms)
            found[is_used] = np.linalg.lstsq(scaled[:, is_used], target, rcond=None)[0]
            below = is_used & (found <= 0)
            if not below.any():
                break
            share = (terms[below] / np.maximum(terms[below] - found[below], 1e-300)).min()
            terms = terms + share * (found - terms)
            is_used &= terms > 1e-12
            terms[~is_used] = 0.0
        terms = found
    solution: Columns = terms / scale
    return solution


def _point_of(record: StepRecord) -> StepPoint | None:
    """None: it says too little, or nothing was computed."""
    done = record.scheduled_requests
    rows, tokens, prompts = done.num_decode_requests, done.sum_prefill_tokens, done.num_prefill_requests
    if rows is UNSET or tokens is UNSET or prompts is UNSET or not record.wall_time or not rows + tokens:
        return None
    read = 0 if done.sum_prefill_kv_tokens is UNSET else done.sum_prefill_kv_tokens
    context = read + (0 if done.sum_decode_kv_tokens is UNSET else done.sum_decode_kv_tokens)
    return StepPoint(
        decode_rows=rows, prefill_tokens=tokens, context_tokens=context, ms=1e3 * record.wall_time, prompts=prompts,
        prefill_context_tokens=read,
    )  # fmt: skip


def _bin_of(point: StepPoint) -> tuple[int, ...]:
    """Steps of one bin are alike within a fifth."""
    sizes = (point.decode_rows, point.prefill_tokens, point.context_tokens, point.prefill_context_tokens or 0)
    return *(round(_BINS_PER_OCTAVE * math.log2(1 + size)) for size in sizes), point.prompts


def _median(alike: Sequence[StepPoint]) -> StepPoint:
    values: Mapping[str, Any] = {
        name: float(np.median([getattr(point, name) for point in alike])) for name in StepPoint.__struct_fields__
    }
    point = {name: value if name == "ms" else round(value) for name, value in values.items()}
    return StepPoint(**point | {"steps": len(alike), "ms": round(point["ms"], 4)})


_decode_record = msgspec.json.Decoder(StepRecord).decode
