"""tools/chaos.py says before what it will do, and afterwards, in a table and as JSON, what must not have been."""

from __future__ import annotations

import json

import pytest

from benchmarks.chaos.campaign import Outcome
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.records import Hit
from benchmarks.chaos.verdict import Violation
from tools import chaos


def outcome_of(violations):
    hits = [Hit(Fault("engine_killed", "decode.engine", 3.0, 1), 10.0, 10.0, end) for end in (12.0, 14.0)]
    for hit in hits:
        hit.requests.update(ok=4, dropped=1)
    return Outcome("mocker-1+1", hits, lies_s=[0.0, 1.5], requests={"ok": 9}, violations=violations, exit_code=0)


def test_the_plan_of_a_seed_is_said_without_doing_it(capsys):
    assert chaos.main(["--plan", "5", "--seed", "7", "--topology", "mocker-2+2"]) == 0
    first = capsys.readouterr().out
    chaos.main(["--plan", "5", "--seed", "7", "--topology", "mocker-2+2"])
    assert len(first.splitlines()) == 5 and capsys.readouterr().out == first


def test_the_table_has_a_row_a_kind_with_recovery_lies_and_violations():
    (row,) = chaos.rows([outcome_of([Violation("wrong", "a token came again", (1,)), Violation("left", "a file")])])
    assert (row["fault"], row["times"]) == ("engine_killed", 2)
    assert (row["recovery_p50_s"], row["recovery_p99_s"], row["longest_lie_s"]) == (4.0, 4.0, 1.5)
    assert row["violations"] == {"wrong": 1} and row["requests"] == {"ok": 8, "dropped": 2}


@pytest.mark.parametrize(
    ("violations", "code"), [([], 0), ([Violation("left", "a file")], 1), ([Violation("lie", "ready", (0,))], 1)]
)
def test_any_violation_fails_the_campaign(violations, code, tmp_path, capsys):
    assert chaos.conclude([outcome_of(violations)], tmp_path, {"seed": 7}) == code
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["seed"] == 7 and len(told["topologies"][0]["violations"]) == len(violations)
