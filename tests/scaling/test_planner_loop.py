"""A planner at work on a deployment: it acts, waits and holds, and stays within its budget whatever happens."""

import math
import threading
import time

import msgspec
import pytest

from bireme.config import MockerConfig
from bireme.errors import ConfigError, UnavailableError
from bireme.planner.capacity import PlannedEngine
from bireme.planner.planner import WorkerPlanner
from bireme.planner.planner_settings import PlannerSettings, StageBounds
from bireme.scaling.observer import LiveObserver
from bireme.scaling.plan_record import DecisionLog, PlanRecord
from bireme.scaling.planner_file import PlannerFile
from bireme.scaling.planner_loop import PlannerLoop
from bireme.sizing.step_times import StepTimes
from tests.scaling.played_deployment import PlayedDeployment

# A prompt of 1,000 tokens takes 110 ms; a step of so many rows 10 ms and 1 more for each.
ENGINE = PlannedEngine(
    StepTimes.of_mocker(MockerConfig(step_ms=10, step_ms_per_request=1, prefill_ms=0, prefill_ms_per_token=0.1))
)
BUSY, QUIET = 900, 60  # requests a minute
LIMIT_S = 60
SETTINGS = PlannerSettings(max_gpus=8, interval_s=60, start_s=60, reversal_s=300, down_window_s=120)


class Played:
    def __init__(self, settings=SETTINGS, acts=True, settings_file=None, deployment=None, tellers=()):
        self.deployment = deployment or PlayedDeployment()
        self.records, self.complaints = [], []
        planner = WorkerPlanner(settings, ENGINE, ENGINE)
        observer = LiveObserver(
            self.deployment, settings.interval_s, lambda: self.deployment.now, lambda: self.deployment.clock
        )
        self.loop = PlannerLoop(
            planner, observer, self.deployment, [self.records.append, *tellers],
            acts=acts, settings_file=settings_file, complain=self.complaints.append,
        )  # fmt: skip
        self.loop.turn()  # the first look decides nothing

    def minutes(self, count, requests):
        for _ in range(count):
            self.deployment.serve(requests)
            self.loop.turn()
        return self.records[-1]

    @property
    def workers(self):
        return sum(self.deployment.counts.values())


def test_the_first_look_decides_nothing():
    played = Played(deployment=PlayedDeployment(3, 2))
    assert played.records[0].result == "hold" and played.deployment.scaled == []
    assert "the first look" in played.records[0].reason


def test_workers_follow_the_load_up_and_down_and_back_to_the_minimum_when_it_ends():
    played = Played()
    up = played.minutes(3, BUSY)
    assert played.workers > 4 and up.requests_per_s == pytest.approx(15.0)
    assert any(record.result == "up" and record.done for record in played.records)
    played.minutes(25, QUIET)
    assert played.workers == 3
    played.minutes(2, BUSY)
    played.minutes(8, BUSY)
    played.minutes(3, 0)
    assert played.workers == 2 and played.records[-1].stages["prefill"].wanted == 1


def test_advice_changes_nothing():
    played = Played(acts=False)
    record = played.minutes(4, BUSY)
    assert played.deployment.scaled == [] and played.workers == 2
    assert record.result == "up" and record.stages["prefill"].wanted > 1 and not record.acts


def test_a_worker_that_never_becomes_ready_is_asked_for_once_and_told_of():
    settings = msgspec.structs.replace(SETTINGS, ready_timeout_s=200)
    played = Played(settings)
    played.deployment.stuck = {"prefill", "decode"}
    record = played.minutes(8, BUSY)
    assert len(played.deployment.scaled) == 1 and played.workers == 2
    assert "prefill not ready for" in record.reason and "not asked for again" in record.reason


def test_a_load_that_flaps_does_not_make_workers_flap():
    played = Played()
    sizes = [1]
    for number in range(20):
        played.minutes(1, QUIET if number % 2 else BUSY)
        sizes.append(played.deployment.asked["prefill"])
    ways = [after - before for before, after in zip(sizes, sizes[1:], strict=False) if after != before]
    assert ways[0] > 0 and sum(way < 0 for way in ways) <= 1


@pytest.mark.parametrize("failure", ["http://a:8004: no admin door answers there", "metrics can't be read: refused"])
def test_what_is_missing_holds_all_sizes_and_names_what(failure):
    played = Played()
    played.minutes(3, BUSY)
    before, num_scaled = dict(played.deployment.counts), len(played.deployment.scaled)
    played.deployment.failure = failure
    record = played.minutes(3, QUIET)
    assert record.result == "hold" and failure in record.reason
    assert played.deployment.counts == before and len(played.deployment.scaled) == num_scaled


def test_sizes_that_can_t_be_told_start_and_end_nobody():
    played = Played(deployment=PlayedDeployment(4, 4))
    played.deployment.sizes = lambda: (_ for _ in ()).throw(UnavailableError("the API server is away"))
    record = played.minutes(2, BUSY)
    assert record.result == "hold" and record.stages == {} and "the API server is away" in record.reason
    assert played.deployment.scaled == []


def test_a_smaller_budget_holds_at_once_even_while_figures_are_missing(tmp_path):
    path = tmp_path / "planner.yaml"

    def write(max_gpus):
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(SETTINGS, max_gpus=max_gpus)))

    write(8)
    played = Played(settings_file=PlannerFile(path))
    played.minutes(3, BUSY)
    assert played.workers > 4
    write(4)
    played.deployment.failure = "nobody answers"
    record = played.minutes(1, BUSY)
    assert record.max_gpus == 4 and "settings anew: 4 GPUs" in record.reason
    assert sum(played.deployment.asked.values()) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_gpus: 1", "planner.max_gpus: 1; the minimum of 1 prefill and 1 decode workers needs 2"),
        ("max_gpu: 3", "max_gpu"),
        ("max_gpus: [", "it can't be read"),
        ("{max_gpus: 4, interval_s: 5}", "planner.interval_s: it can't change from 60.0"),
    ],
)
def test_settings_that_can_t_be_leave_the_former_ones(tmp_path, text, says):
    path = tmp_path / "planner.yaml"
    path.write_bytes(msgspec.json.encode(SETTINGS))
    played = Played(settings_file=PlannerFile(path))
    path.write_text(text)
    record = played.minutes(1, BUSY)
    assert "settings as before: " in record.reason and says in record.reason and record.max_gpus == 8
    assert played.minutes(1, BUSY).reason.count("settings as before") == 0  # told once
    assert played.workers > 2


def test_a_budget_below_the_minimum_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"planner.max_gpus: 1; the minimum of 1 prefill and 1 decode"):
        WorkerPlanner(PlannerSettings(max_gpus=1), ENGINE, ENGINE)


def test_who_ends_holds_its_gpu_until_it_has_ended():
    settings = msgspec.structs.replace(SETTINGS, max_gpus=4, decode=StageBounds(maximum=1))
    deployment = PlayedDeployment(1, 1)
    played = Played(settings, deployment=deployment)
    deployment.serve(BUSY)
    deployment.ending = {"decode": 2}
    played.loop.turn()
    record = played.records[-1]
    assert record.stages["prefill"].wanted == 3 and deployment.scaled == []
    assert "prefill: 2 more once others have ended and their GPUs are free" in record.reason
    played.minutes(1, BUSY)
    assert deployment.asked["prefill"] == 3


def test_what_is_refused_is_told_and_tried_again():
    played = Played()

    def refuse(wanted):
        raise UnavailableError("decode_1 is the last that takes requests")

    scale, played.deployment.scale = played.deployment.scale, refuse
    record = played.minutes(1, BUSY)
    assert record.failure == "decode_1 is the last that takes requests" and "NOT DONE" in record.line()
    played.deployment.scale = scale
    assert played.minutes(1, BUSY).done


def test_a_log_that_can_t_be_written_stops_no_decision():
    def full(record):
        raise OSError(28, "No space left on device")

    played = Played(tellers=[full])
    played.minutes(2, BUSY)
    assert played.workers > 2 and "No space left on device" in played.complaints[-1]


def test_where_requests_are_slow_although_the_table_says_none_would_be_decode_has_room_for_more():
    played = Played()
    played.minutes(3, QUIET)
    before = played.workers
    played.deployment.ttft_s |= {"0.25": 0.5, "0.5": 0.8}
    played.deployment.mean_gap_s |= {"0.025": 0.5, "0.05": 0.9}
    record = played.minutes(2, QUIET)
    assert (
        record.cached_tokens == 0.0
        and record.late_share == pytest.approx(0.2)
        and record.slow_share == pytest.approx(0.1)
    )
    assert record.stages["decode"].wanted > 1 and played.minutes(1, QUIET).result and played.workers > before


def test_an_error_of_the_planner_itself_is_a_hold_with_its_trace_and_the_next_turn_decides():
    played = Played()
    sizes, played.deployment.sizes = played.deployment.sizes, lambda: {}["prefill"]
    record = played.minutes(1, BUSY)
    assert (record.result, record.reason, record.stages) == ("hold", "hold: failed: KeyError: 'prefill'", {})
    assert "Traceback" in played.complaints[-1] and played.deployment.scaled == []
    played.deployment.sizes = sizes
    played.minutes(2, BUSY)
    assert played.workers > 2


def test_while_a_look_hangs_each_interval_tells_a_hold_and_the_next_look_decides_again():
    played, goes_on, stopping = Played(), threading.Event(), threading.Event()
    pages = played.deployment.pages
    played.deployment.pages = lambda: goes_on.wait(LIMIT_S) and pages()
    running = threading.Thread(target=played.loop.run, args=(0.01, math.inf, stopping))
    running.start()
    wait_for(lambda: len(played.records) > 4)
    assert {one.result for one in played.records} == {"hold"} and played.deployment.scaled == []
    assert "the last turn's look or what it began takes 0 s so far" in played.records[-1].reason
    goes_on.set()
    wait_for(lambda: played.records[-1].stages)  # nothing new, but it was seen
    stopping.set()
    running.join(LIMIT_S)
    assert not running.is_alive()


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_decision_is_a_line_of_the_log(tmp_path):
    log = DecisionLog(tmp_path / "decisions.jsonl")
    played = Played(tellers=[log.write])
    played.minutes(3, BUSY)
    log.close()
    read = [msgspec.json.decode(line, type=PlanRecord) for line in open(tmp_path / "decisions.jsonl", "rb")]
    assert read == played.records and read[-1].ttft_ms == pytest.approx(110.0)
