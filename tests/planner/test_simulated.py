"""Both planners in the simulator."""

import json

import pytest

from bireme.planner.simulated import reversals
from tools import simulate as program


def test_reversals_are_counted_by_what_changed():
    assert reversals([1, 2, 2, 3], [0, 60, 120, 180], 600) == (0, 0)
    assert reversals([1, 2, 1, 1, 2], [0, 60, 120, 180, 240], 600) == (2, 2)
    assert reversals([1, 2, 1, 1, 2], [0, 60, 120, 900, 960], 600) == (2, 1)


ARGUMENTS = [
    *("day", "--requests", "500", "--rate", "0.5", "--prefill-workers", "2", "--workers", "1", "--modes", "kv"),
    *("--step-ms", "20", "--prefill-ms-per-token", "3", "--config", '{"transfer_ms": 0}', "--slo-ttft-ms", "4000"),
    *("--planner", "sla"),
]


def test_the_program_compares_the_planner_with_dynamo_s_rule_and_the_best_fixed_size(capsys):
    assert program.main(ARGUMENTS) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    rows = json.loads(last)["rows"]
    assert [row.get("planner") for row in rows] == [None, "planner", "dynamo"]
    planned = rows[1]
    assert planned["most_gpus"] <= 3 and planned["most_reversals_in_10_min"] <= 1
    assert planned["requests"] == 500 and all(reason for *_, reason in planned["decisions"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--max-gpus", "1"], "planner.max_gpus: 1; the minimum of 1 prefill and 1 decode"),
        (["--prefill-workers", "0"], "--planner: --prefill-workers 1 or more"),
        (["--interval-s", "0"], "interval_s"),
    ],
)
def test_the_program_refuses_bounds_that_can_t_be(more, says, capsys):
    assert program.main([*ARGUMENTS, *more]) == 2
    assert says in capsys.readouterr().err
