"""Each program of tools/, benchmarks/ and models/ is run by a test: one that nobody runs breaks unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repository.house import CHECKOUT
from tests.server.programs import ELSEWHERE, RUNS


def programs():
    found = [path for part in ("tools", "benchmarks", "models") for path in (CHECKOUT / part).glob("*.py")]
    return {f"{path.parent.name}/{path.name}" for path in found if '__name__ == "__main__"' in path.read_text()}


def test_every_program_is_run_by_a_test():
    assert programs() == RUNS.keys() | ELSEWHERE.keys(), (
        "add it to tests/server/programs.py with arguments of a short run"
    )


def test_each_benchmark_with_arguments_is_named_where_they_are_run():
    named = (CHECKOUT / "tests/server/test_programs.py").read_text()
    assert [name for name in RUNS if name.startswith("benchmarks/") and f'"{name}"' not in named] == []


def test_no_program_is_listed_twice():
    assert not RUNS.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize(("program", "test"), ELSEWHERE.items(), ids=ELSEWHERE)
def test_the_test_that_runs_a_program_names_it(program, test):
    assert Path(program).stem in (CHECKOUT / test).read_text()
