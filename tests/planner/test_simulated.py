"""Both planners in the simulator."""

import json

import numpy as np
import pytest

from bireme.config import MockerConfig, RouterConfig
from bireme.errors import ConfigError
from bireme.planner.capacity import PlannedEngine
from bireme.planner.planner import WorkerPlanner
from bireme.planner.planner_settings import PlannerSettings, StageBounds
from bireme.planner.simulated import SimulatedScaler, reversals
from bireme.sizing.simulator.cluster import ClusterSettings, simulate
from bireme.sizing.simulator.trace import SimulatedRequest
from bireme.sizing.simulator.worker import SimulatedEngine
from bireme.sizing.step_times import StepTimes
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


def test_the_planner_runs_alone(capsys):
    assert program.main([*ARGUMENTS, "--compare", "none"]) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert [row["planner"] for row in json.loads(last)["rows"]] == ["planner"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--max-gpus", "1"], "planner.max_gpus: 1; the minimum of 1 prefill and 1 decode"),
        (["--prefill-workers", "0"], "--planner: --prefill-workers 1 or more"),
    ],
)
def test_the_program_refuses_bounds_that_can_t_be(more, says, capsys):
    assert program.main([*ARGUMENTS, *more]) == 2
    assert says in capsys.readouterr().err


def test_the_program_refuses_an_interval_without_a_second(capsys):
    with pytest.raises(SystemExit, match="2"):
        program.main([*ARGUMENTS, "--interval-s", "0"])
    assert "argument --interval-s: 0; more than 0" in capsys.readouterr().err


TIMES = StepTimes.of_mocker(MockerConfig(step_ms=10, prefill_ms=5, prefill_ms_per_token=0.1))
NIGHT_S = 7200.0


def slept(asleep, scaler=None):
    """An hour of requests, two without, one request: return the outcome and when sizes were decided."""
    times = [*np.arange(0.0, 3600.0, 5.0).tolist(), 3600.0 + NIGHT_S + 10, 3600.0 + NIGHT_S + 200]
    requests = [SimulatedRequest(at, 400, 20, np.zeros(0, np.uint64)) for at in times]
    engine = SimulatedEngine(TIMES)
    settings = ClusterSettings(
        1, 1, engine, engine, router=RouterConfig(transfer_ms=0), start_s=90.0, interval_s=60.0, asleep=asleep
    )
    none = StageBounds(minimum=0)
    bounds = PlannerSettings(prefill=none, decode=none, start_s=90.0, max_gpus=4)
    scaler = scaler or SimulatedScaler(WorkerPlanner(bounds, PlannedEngine(TIMES), PlannedEngine(TIMES)).decide)
    return simulate(requests, "kv", settings, lambda done: None, scaler), scaler


def test_both_stages_sleep_after_a_while_without_requests_and_wake_for_the_first_one():
    outcome, scaler = slept("wait")
    asleep = [at for at, one in scaler.decisions if (one.prefill, one.decode) == (0, 0)]
    assert asleep[0] == 3600 + 2 * 60  # intervals without a request
    assert asleep[-1] == 3600 + NIGHT_S  # the decision after the request came wakes them
    assert len(outcome.ttft_s) == 722 and outcome.num_refused == 0
    assert 90 + 50 <= max(outcome.ttft_s) < 90 + 51  # to the decision, and the start
    assert sorted(outcome.ttft_s)[-2] < 1.0  # all others
    assert outcome.summary()["worker_hours"] < 2 * (3600 + 200 + 300) / 3600


def test_a_request_is_refused_while_all_sleep_where_the_rule_says_so():
    outcome, _ = slept("refuse")
    assert outcome.num_refused == 1 and len(outcome.ttft_s) == 721
    assert max(outcome.ttft_s) < 1.0


def test_a_scaler_that_never_wakes_is_told():
    class Asleep:
        def on_interval(self, figures):
            return 0, 0

    with pytest.raises(ConfigError, match="lets all sleep for a day"):
        slept("wait", Asleep())
