"""Pictures of fronts, where matplotlib is installed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.errors import BiremeError
from bireme.sizing.pareto import OperatingPoint, front

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Color, mark, and where a point's name stands above it: told apart without colors, too.
_LOOKS = (("#0072B2", "o", 4), ("#D55E00", "s", -9), ("#009E73", "^", 12), ("#CC79A7", "D", -17))
_PNG_DPI = 150


class NoPictureError(BiremeError):
    """There is no picture; the text says why."""


@dataclass(frozen=True, slots=True)
class FrontPanel:
    title: str
    ways: Mapping[str, Sequence[OperatingPoint]]  # by name; all that was measured, with what the front leaves out


def draw_fronts(rows: Sequence[Sequence[FrontPanel]], unit: str) -> Figure:
    """Return a picture of panels in rows; `unit`: what tokens/s are divided by. Raises NoPictureError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPictureError("matplotlib is not installed (pip install matplotlib)") from error
    num_columns = max(len(row) for row in rows)
    figure = Figure(figsize=(6.0 * num_columns, 4.4 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), num_columns, squeeze=False)
    for row, across in zip(axes, rows, strict=True):
        for axis, panel in zip(row, across, strict=False):
            _draw(axis, panel, unit)
        for axis in row[len(across) :]:
            axis.set_axis_off()
    return figure


def _draw(axis: Axes, panel: FrontPanel, unit: str) -> None:
    for (color, marker, aside), (name, points) in zip(_LOOKS, panel.ways.items(), strict=False):
        best = front(points)
        others = [point for point in points if point not in best]
        look: dict[str, Any] = {"color": color, "marker": marker}
        axis.plot(*_columns(others), linestyle="none", alpha=0.35, **look)
        axis.plot(*_columns(best), linestyle="none", label=name, **look)
        axis.plot(*_columns([*_from_nothing(best), *best]), drawstyle="steps-pre", color=color)
        for point in best:
            axis.annotate(
                point.name, (point.per_user, point.per_gpu), textcoords="offset points", xytext=(5, aside), fontsize=6
            )
    axis.set(title=panel.title, xlabel="tokens/s a user", ylabel=f"tokens/s a {unit}", xlim=(0, None), ylim=(0, None))
    axis.set_xlim(right=axis.get_xlim()[1] * 1.25)  # for the last label
    axis.set_ylim(top=axis.get_ylim()[1] * 1.05)
    axis.grid(alpha=0.3)
    if any(panel.ways.values()):
        axis.legend(loc="best")


def _from_nothing(best: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """Return where the staircase begins: a small promise is kept by the point with the most tokens/s a GPU."""
    return [OperatingPoint(0.0, best[0].per_gpu)] if best else []


def _columns(points: Sequence[OperatingPoint]) -> tuple[list[float], list[float]]:
    return [point.per_user for point in points], [point.per_gpu for point in points]


def write_png(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_PNG_DPI, format="png")


def svg(figure: Figure) -> str:
    """Return it as an element of a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]
