"""The report of a sweep: for each length the fronts of both ways to serve, which is better where, and every cell."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from bireme.sizing import chart
from bireme.sizing.figures import Figures
from bireme.sizing.pareto import EQUAL_WITHIN, OperatingPoint, front, most_apart
from bireme.sizing.report import Page, Section, Table, render
from bireme.sizing.verdict import Way, verdict
from tools.sweeping.matrix import Matrix, Plan
from tools.sweeping.results import Run, write

KINDS = ("aggregated", "disaggregated")
_MIXED = "GPU or worker"
_SOURCES = {"aiperf": "aiperf", "bireme": "bireme's load"}


def keeps_limits(figures: Figures, matrix: Matrix) -> bool:
    """Return whether nine of ten requests were as fast as the matrix asks."""
    pairs = ((figures.ttft_p90_ms, matrix.ttft_ms), (figures.itl_p90_ms, matrix.itl_ms))
    return all(not limit or (value is not None and value <= limit) for value, limit in pairs)


def points_of(runs: Iterable[Run]) -> list[OperatingPoint]:
    """Return what was measured, of repeats the medians; a run without a gap between tokens has no place on a front."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        if run.figures is not None and run.tokens_per_s_per_gpu is not None and run.figures.tokens_per_s_per_user_p50:
            seen = run.figures.tokens_per_s_per_user_p50, run.tokens_per_s_per_gpu
            found.setdefault(f"{run.cell.deployment}, {run.cell.pressure}", []).append(seen)
    return [OperatingPoint(*map(statistics.median, zip(*seen, strict=True)), name) for name, seen in found.items()]


def spread_of(runs: Sequence[Run]) -> float | None:
    """Return by how much the repeats of a cell differ, of the cells that do most; None: there are no repeats."""
    found: dict[tuple[str, ...], list[float]] = {}
    for run in runs:
        if run.figures is not None and run.figures.tokens_per_s > 0:
            key = run.cell.deployment, run.cell.lengths, run.cell.pressure, run.cell.load
            found.setdefault(key, []).append(run.figures.tokens_per_s)
    return max((max(rates) / min(rates) - 1 for rates in found.values() if len(rates) > 1), default=None)


def ways_of(runs: Sequence[Run], matrix: Matrix, lengths: str, load: str) -> dict[str, list[OperatingPoint]]:
    """Return the points that count of each way to serve that the sweep has."""
    picked = [run for run in runs if run.cell.lengths == lengths and run.cell.load == load]
    kinds = [kind for kind in KINDS if any(run.deployment.kind == kind for run in picked)]
    counting = [run for run in picked if run.figures is not None and keeps_limits(run.figures, matrix)]
    return {kind: points_of(run for run in counting if run.deployment.kind == kind) for kind in kinds}


def sentences(
    ways: Mapping[str, Sequence[OperatingPoint]], unit: str, equal_within: float, planned: Container[str] = ()
) -> list[str]:
    """`planned`: ways that the sweep has, measured or not."""
    if len(ways) < 2:
        missing = next(kind for kind in KINDS if kind not in ways)
        if missing in planned:
            return [f"Nothing {missing} is measured yet, so there is nothing to compare."]
        return [f"Nothing {missing} is in this sweep; name such a recipe as well to have both compared."]
    one, other = (Way(kind, points) for kind, points in ways.items())
    return verdict(one, other, unit, equal_within)


def published_label(ways: Mapping[str, Sequence[OperatingPoint]]) -> list[str]:
    """Return what published plots of two fronts are labeled with."""
    if len(ways) < 2 or (pair := most_apart(*(front(points) for points in ways.values()))) is None:
        return []
    one, other, ratio = pair
    better, worse = (one, other) if one.per_gpu >= other.per_gpu else (other, one)
    return [
        f'Published plots would have the label "{ratio:.1f}x better": of points nearest in tokens/s a user the pair'
        f" widest apart, {better.name} ({better.per_user:,.1f}) over {worse.name} ({worse.per_user:,.1f})."
    ]


def agreement(runs: Sequence[Run], loads: Sequence[str]) -> list[str]:
    """Return what two loads say of the same cells."""
    if len(loads) < 2:
        return []
    first, second = loads[:2]
    rates = {
        load: {
            (run.cell.deployment, run.cell.lengths, run.cell.pressure, run.cell.repeat): run.figures.tokens_per_s
            for run in runs
            if run.cell.load == load and run.figures is not None
        }
        for load in (first, second)
    }
    both = sorted(rates[first].keys() & rates[second].keys())
    if not both:
        return []
    ratios = [rates[first][key] / rates[second][key] for key in both]
    return [
        f"{_SOURCES[first]} saw {min(ratios):.2f} to {max(ratios):.2f} times the tokens/s that {_SOURCES[second]} saw,"
        f" over {len(both)} cells. {_SOURCES['aiperf']} sends chats as text, {_SOURCES['bireme']} the same number of"
        " tokens as ids."
    ]


def unit_of(runs: Sequence[Run]) -> str:
    units = {run.share.unit for run in runs if run.share is not None}
    return units.pop() if len(units) == 1 else "GPU" if not units else _MIXED


def comparison(plan: Plan, runs: Sequence[Run], lengths: str) -> list[str]:
    """Return which way is better where, as each load has seen it."""
    unit, equal_within = unit_of(runs), max(EQUAL_WITHIN, spread_of(runs) or 0.0)
    by_load = {load: ways_of(runs, plan.matrix, lengths, load) for load in plan.matrix.loads}
    planned = {deployment.kind for deployment in plan.deployments}
    if unit == _MIXED:
        return ["Some launches used GPUs and others none: tokens/s a GPU of the ones and of the others are no match."]
    return [
        f"[{load}] {text}"
        for load, ways in by_load.items()
        if ways
        for text in sentences(ways, unit, equal_within, planned)
    ]


def trust(runs: Sequence[Run]) -> str:
    """Return how far the figures would come again."""
    spread = spread_of(runs)
    if spread is None:
        return "Each cell was measured once, so nobody knows how far its figures would come again; --repeats 3 tells."
    equal = f"; so much counts as equal below, {EQUAL_WITHIN:.0%} at least"
    return f"Repeats of a cell differed by {spread:.0%} in tokens/s at most{equal}. Fronts have their medians."


def make_page(plan: Plan, runs: Sequence[Run], conditions: Sequence[str]) -> tuple[Page, list[list[chart.FrontPanel]]]:
    """Return the page, still without pictures, and the panels of each of its sections."""
    unit, loads = unit_of(runs), plan.matrix.loads
    sections, panels = [], []
    for lengths in dict.fromkeys(cell.lengths for cell in plan.cells):
        by_load = {load: ways_of(runs, plan.matrix, lengths, load) for load in loads}
        prompt, answer = lengths.split("/")
        told = comparison(plan, runs, lengths)
        told += [f"[{load}] {text}" for load, ways in by_load.items() for text in published_label(ways)]
        fronts = [
            [load, kind, point.name, f"{point.per_user:,.1f}", f"{point.per_gpu:,.1f}"]
            for load, ways in by_load.items()
            for kind, points in ways.items()
            for point in front(points)
        ]
        columns = ["load", "way", "what runs", "tokens/s a user", f"tokens/s a {unit}"]
        table = Table("The fronts: nothing measured gives more of both", columns, fronts)
        title = f"Prompts of {int(prompt):,} tokens, answers of {int(answer):,}"
        sections.append(Section(title, told, tables=[table]))
        panels.append([chart.FrontPanel(f"{lengths}, {_SOURCES[load]}", ways) for load, ways in by_load.items()])
    lead = [*lead_of(plan, runs, unit), trust(runs), *agreement(runs, loads)]
    names = ", ".join(dict.fromkeys(Path(one.recipe).name for one in plan.deployments))
    return Page(f"Sweep of {names}", lead, [*sections, *_tables(plan, runs, unit, conditions)]), panels


def lead_of(plan: Plan, runs: Sequence[Run], unit: str) -> list[str]:
    num_measured = sum(run.state == "measured" for run in runs)
    num_failed = sum(run.state == "failed" for run in runs)
    left = len(plan.cells) - num_measured - num_failed
    told = [f"{num_measured} of {len(plan.cells)} cells measured, {num_failed} failed, {left} not begun."]
    measured = [run for run in runs if run.state == "measured"]
    begun = Counter(run.sweep_began_at for run in measured if run.sweep_began_at)
    if len(begun) > 1:
        parts = [f"{count} cell{'s' if count > 1 else ''} from {_at(at)} on" for at, count in sorted(begun.items())]
        told.append(
            f"Measured in {len(begun)} goes, as it was resumed: {', '.join(parts)} (UTC). The machine may"
            " have been busier in one than in another."
        )
    if len(commits := sorted({run.commit for run in measured if run.commit})) > 1:
        told.append(f"Cells are of {len(commits)} commits: {', '.join(commits)}.")
    bursts = sum(
        run.figures is not None and run.figures.tokens_per_s_per_user_p50 is None and run.cell.output_tokens > 1
        for run in measured
    )
    if bursts:
        told.append(
            f"{bursts} cell{'s are' if bursts > 1 else ' is'} on no front: most of the answers came as a whole at one"
            " time, as on a busy machine, so nobody knows their tokens/s a user. Longer answers tell more."
        )
    if unit != "GPU":
        told.append("Tokens/s are divided by workers where no GPU is used: each counts as one GPU would.")
    limits = [
        f"{name} at p90 up to {value:g} ms"
        for name, value in (("TTFT", plan.matrix.ttft_ms), ("ITL", plan.matrix.itl_ms))
        if value
    ]
    if limits:
        kept = sum(run.figures is not None and keeps_limits(run.figures, plan.matrix) for run in runs)
        told.append(f"Only cells with {' and '.join(limits)} count for the fronts: {kept} of {num_measured}.")
    return told


def _tables(plan: Plan, runs: Sequence[Run], unit: str, conditions: Sequence[str]) -> list[Section]:
    columns = [
        "what runs", "tokens", "load", "by", f"tokens/s a {unit}", "tokens/s a user", "tokens/s", f"{unit}s",
        "requests", "TTFT p50, ms", "p90", "p99", "ITL p50, ms", "p90", "p99", "prompt tokens", "answer tokens",
        "begun, UTC",
    ]  # fmt: skip
    failed = [[run.cell.deployment, run.cell.lengths, run.cell.pressure, run.cell.load, run.reason] for run in runs
              if run.state == "failed"]  # fmt: skip
    deployments = [
        [
            one.name,
            one.kind,
            ", ".join(f"{count} {stage}" for stage, count in one.workers.items()),
            " ".join(one.settings),
        ]
        for one in plan.deployments
    ]
    return [
        Section("What failed", [] if failed else ["Nothing."], tables=[
            Table("", ["what runs", "tokens", "load", "by", "reason"], failed),
        ]),
        Section("Every cell", tables=[Table("", columns, [_row(run) for run in runs if run.figures is not None])]),
        Section("What was served", tables=[Table("", ["name", "way", "workers", "settings"], deployments)]),
        Section("How it was measured", [*conditions, *_method(plan.matrix)]),
    ]  # fmt: skip


def _row(run: Run) -> list[str]:
    figures, share = run.figures, run.share
    assert figures is not None and share is not None
    times = (
        figures.ttft_p50_ms, figures.ttft_p90_ms, figures.ttft_p99_ms,
        figures.itl_p50_ms, figures.itl_p90_ms, figures.itl_p99_ms,
    )  # fmt: skip
    return [
        run.cell.deployment, run.cell.lengths, run.cell.pressure, run.tool, _number(run.tokens_per_s_per_gpu),
        _number(figures.tokens_per_s_per_user_p50), _number(figures.tokens_per_s), str(share.count),
        str(figures.requests), *(_number(value) for value in times),
        _number(figures.input_tokens), _number(figures.output_tokens), _at(run.began_at),
    ]  # fmt: skip


def _at(text: str) -> str:
    """2026-11-28T01:56:05+00:00 -> 2026-11-28 01:56"""
    return text[:16].replace("T", " ")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _method(matrix: Matrix) -> list[str]:
    return [
        "Tokens/s is of all answers, from the first request to the last token. Tokens/s a user is one over the mean gap"
        " between a request's tokens, of the median request. Tokens/s a GPU is tokens/s over the GPUs that"
        " the launch's engines use.",
        "A front keeps the points that no other equals or beats in both. It is read as a staircase: a promise to a"
        " user is kept by every point that gives as much or more.",
        f"Of each cell {matrix.requests_per_stream} requests for each one under way were measured, after"
        f" {matrix.warmup_per_stream} that were not; at a rate, those of {matrix.rate_seconds:g} s. No two cells have"
        " the same prompts, and no prompt comes twice.",
    ]


def write_report(folder: Path, plan: Plan, runs: Sequence[Run], conditions: Sequence[str]) -> tuple[Path, str]:
    """Write report.html and, where matplotlib is, report.png; return the page's path, and why there is no picture."""
    page, panels = make_page(plan, runs, conditions)
    path, unit, reason = folder / "report.html", unit_of(runs), ""
    try:
        if any(points for row in panels for panel in row for points in panel.ways.values()):
            page = _with_pictures(page, panels, unit)
            chart.write_png(chart.draw_fronts(panels, unit), folder / "report.png")
        else:
            reason = "nothing was measured that a picture could show"
    except chart.NoPictureError as error:
        reason = str(error)
    write(path, render(page).encode())
    return path, reason


def _with_pictures(page: Page, panels: Sequence[Sequence[chart.FrontPanel]], unit: str) -> Page:
    sections = list(page.sections)
    for at, row in enumerate(panels):
        old = sections[at]
        says = f"Tokens/s a {unit} against tokens/s a user; the table of fronts below has the same values"
        picture = "".join(chart.svg(chart.draw_fronts([[panel]], unit)) for panel in row)
        sections[at] = Section(old.title, old.sentences, picture, says, old.tables)
    return Page(page.title, page.lead, sections)
