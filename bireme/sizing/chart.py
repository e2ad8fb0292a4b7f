"""Pictures of fronts, where matplotlib is installed."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.errors import BiremeError
from bireme.sizing.pareto import OperatingPoint, front

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Color and mark of a way: told apart without colors, too.
_LOOKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))
_FAINT = 0.35  # what is on no front
_MARK = 4.0  # half a mark, in pixels
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
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPictureError("matplotlib is not installed (pip install matplotlib)") from error
    num_columns = max(len(row) for row in rows)
    figure = Figure(figsize=(5.4 * num_columns, 4.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)  # which can tell how large a text is
    axes = figure.subplots(len(rows), num_columns, squeeze=False)
    for row, across in zip(axes, rows, strict=True):
        for axis, panel in zip(row, across, strict=False):
            _draw(axis, panel, unit)
        for axis in row[len(across) :]:
            axis.set_axis_off()
    figure.draw_without_rendering()
    for row, across in zip(axes, rows, strict=True):
        for axis, panel in zip(row, across, strict=False):
            _name_points(figure, axis, panel)
    return figure


def _draw(axis: Axes, panel: FrontPanel, unit: str) -> None:
    has_others = False
    for (color, marker), (name, points) in zip(_LOOKS, panel.ways.items(), strict=False):
        best = front(points)
        others = [point for point in points if point not in best]
        has_others |= bool(others)
        look: dict[str, Any] = {"color": color, "marker": marker}
        axis.plot(*_columns(others), linestyle="none", alpha=_FAINT, **look)
        axis.plot(*_columns(best), linestyle="none", label=name, **look)
        axis.plot(*_columns([*_from_nothing(best), *best]), drawstyle="steps-pre", color=color)
    if has_others:
        axis.plot([], [], linestyle="none", marker="o", color="gray", alpha=_FAINT, label="not on a front")
    axis.set(title=panel.title, xlabel="tokens/s a user", ylabel=f"tokens/s a {unit}", xlim=(0, None), ylim=(0, None))
    axis.set_xlim(right=axis.get_xlim()[1] * 1.05)
    axis.set_ylim(top=axis.get_ylim()[1] * 1.05)
    axis.grid(alpha=0.3)
    if any(panel.ways.values()):
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)


def _name_points(figure: Figure, axis: Axes, panel: FrontPanel) -> None:
    """Name the points of fronts where there is room; the axes have their places already."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    taken = []
    for point in itertools.chain.from_iterable(panel.ways.values()):
        x, y = axis.transData.transform((point.per_user, point.per_gpu))
        taken.append(Bbox.from_extents(x - _MARK, y - _MARK, x + _MARK, y + _MARK))
    for (color, _), points in zip(_LOOKS, panel.ways.values(), strict=False):
        for point in front(points):
            for across, up in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                name = axis.annotate(
                    point.name, (point.per_user, point.per_gpu), textcoords="offset points",
                    xytext=(6 * across, 4 * up), fontsize=8, color=color, ha="left" if across > 0 else "right",
                    va="bottom" if up > 0 else "top", path_effects=[withStroke(linewidth=2.5, foreground="white")],
                )  # fmt: skip
                name.set_in_layout(False)
                box = name.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]
                if axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1 and not box.count_overlaps(taken):
                    taken.append(box)
                    break
                name.remove()


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
    figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]
