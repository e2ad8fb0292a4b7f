"""Charts of what was measured over the number of streams, where matplotlib is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Points = Iterable[tuple[float, float]]  # streams, value


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: Mapping[str, Points]  # by label; a line without points is left out


def draw(path: str, panels: Sequence[Panel], value: str, share_y: bool = False) -> None:
    """Write a PNG with the panels side by side; `value` names what they show. Says so where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    num = max(len(panels), 1)
    figure, axes = pyplot.subplots(1, num, figsize=(4.5 * num, 3.5), sharey=share_y, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=False):
        for label, points in panel.lines.items():
            if ordered := sorted(points):
                axis.plot(*zip(*ordered, strict=True), marker="o", label=label)
        axis.set(title=panel.title, xlabel="streams", ylabel=value, xscale="log", ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
