"""The JSON Schema Test Suite, as jsonschema's source package has it, against what a guide accepts.

`.venv/bin/python -m tests.logits.guided.suite` fetches the package and writes the table of docs/guided_decoding.md.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.logits.guided.answers import Grammars

PACKAGE = "jsonschema==4.26.0"
DRAFT = "draft2020-12"
PAGE = Path("docs/guided_decoding.md")
_BEGIN, _END = "<!-- suite: begin -->\n", "<!-- suite: end -->\n"
_MAX_SPELLINGS = 300  # of one instance: orders of names, and characters as they are or in escapes


@dataclass(slots=True)
class Row:
    """One file of the suite."""

    schemas: int = 0
    accepted: int = 0
    valid: int = 0  # instances of the accepted schemas
    possible: int = 0  # of the valid ones: those that an answer can be
    wrong: int = 0  # invalid ones that an answer can be


def fetch(folder: Path) -> Path:
    """Download the package and return the folder of its tests of one draft."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, PACKAGE], check=True, timeout=600)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob(f"*/json/tests/{DRAFT}"))


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text()):
            yield path.stem, case


def run(folder: Path, grammars: Grammars) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for name, case in cases(folder):
        row = rows.setdefault(name, Row())
        row.schemas += 1
        try:
            grammar = grammars.of(case["schema"])
        except ValueError:
            continue
        row.accepted += 1
        for test in case["tests"]:
            is_possible = any(grammars.can_be(grammar, text) for text in spellings(test["data"]))
            row.valid += test["valid"]
            row.possible += test["valid"] and is_possible
            row.wrong += not test["valid"] and is_possible
    return rows


def spellings(value: Any) -> Iterator[str]:
    """Yield the texts of a value: a schema has one order of names, and an answer may escape characters."""
    for ordered in itertools.islice(_orders(value), _MAX_SPELLINGS):
        yield json.dumps(ordered, ensure_ascii=False)
        yield json.dumps(ordered)


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for inner in itertools.product(*(list(_orders(value[name])) for name in names)):
                yield dict(zip(names, inner, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*map(list, map(_orders, value))))
    else:
        yield value


def table(rows: dict[str, Row]) -> str:
    lines = ["| keyword (file of the suite) | schemas | accepted | valid answers | can be given | wrong answers |"]
    lines.append("|---|---|---|---|---|---|")
    whole = Row(*(sum(getattr(row, name) for row in rows.values()) for name in Row.__slots__))
    for name, row in [*sorted(rows.items()), ("all", whole)]:
        lines.append(f"| {name} | {row.schemas} | {row.accepted} | {row.valid} | {row.possible} | {row.wrong} |")
    return "\n".join(lines) + "\n"


def shown_table() -> str:
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = table(run(fetch(Path(folder)), Grammars()))
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(before + _BEGIN + made + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
