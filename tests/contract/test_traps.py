"""docs/trtllm.md's list of traps names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def test_every_trap_has_a_test_that_exists():
    page = (CHECKOUT / "docs" / "trtllm.md").read_text()
    section = page.partition("## Traps and their tests")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ") and not row.startswith(("| trap", "| **"))]
    files = {path: path.read_text() for path in (CHECKOUT / "tests").rglob("test_*.py")}
    assert len(rows) > 50
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, f"no test in {row}"
        missing = [
            f"{file}::{name}"
            for file, name in named
            if not any(str(path).endswith("/" + file) and f"def {name}(" in text for path, text in files.items())
        ]
        assert missing == [], row
