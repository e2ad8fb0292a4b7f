"""Write the Grafana dashboards, docker/grafana/dashboards/*.json, from tools/dashboards/ and the table of metrics.

    python tools/make_dashboards.py             write them
    python tools/make_dashboards.py --check     exit with 1 when the files are not what would be written

A panel names metrics; bireme/metrics.py says whether one is a counter (drawn as a rate), a gauge or a histogram
(drawn as quantiles or as a heatmap). A name or a label that is not in the table fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT
from tools.dashboards import disaggregation, kv, routing, serving
from tools.dashboards.grafana import json_of

FOLDER = CHECKOUT / "docker" / "grafana" / "dashboards"
BOARDS = (serving.BOARD, disaggregation.BOARD, kv.BOARD, routing.BOARD)


def texts() -> dict[str, str]:
    """Return each file's name and text."""
    return {f"{board.name}.json": json_of(board) for board in BOARDS}


def present() -> dict[str, str]:
    """Return what the folder holds, files that nobody writes any more included."""
    return {path.name: path.read_text() for path in FOLDER.glob("*.json")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    made = texts()
    if parser.parse_args().check:
        return 0 if present() == made else 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in present().keys() - made.keys():
        (FOLDER / name).unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text)
        print(f"wrote {(FOLDER / name).relative_to(CHECKOUT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
