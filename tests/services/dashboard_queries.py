"""The queries of docker/grafana/dashboards, as Grafana sends them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from bireme.config import CHECKOUT

FOLDER = CHECKOUT / "docker" / "grafana" / "dashboards"


def queries(window: str) -> list[tuple[str, str]]:
    """Return dashboard and title, and expression, of each panel's and each mark's query with everything chosen."""
    return [
        (f"{path.stem}: {title}", expression)
        for path in sorted(FOLDER.glob("*.json"))
        for title, expression in _queries_of(json.loads(path.read_text()), window)
    ]


def _queries_of(board: dict[str, Any], window: str) -> Iterator[tuple[str, str]]:
    chosen = {one["name"]: one["allValue"] for one in board["templating"]["list"] if one["type"] == "query"}
    panels = [panel for row in board["panels"] for panel in [row, *row.get("panels", [])]]
    drawn = [(panel["title"], one["expr"]) for panel in panels for one in panel.get("targets", [])]
    for title, expression in drawn + [(one["name"], one["expr"]) for one in board["annotations"]["list"]]:
        expression = expression.replace("$__rate_interval", window)
        yield title, re.sub(r"\$(\w+)", lambda found: chosen[found[1]], expression)
