"""A planner's decisions as Prometheus reads them, and as the launch's live view has them."""

import io
import urllib.error
import urllib.request

import pytest

from bireme.discovery import plan_notes
from bireme.discovery.plan_notes import PlanNote
from bireme.errors import BiremeError, ConfigError
from bireme.launch.admin_client import DoorClient
from bireme.launch.admin_door import AdminDoor, AdminSettings
from bireme.launch.console import Console
from bireme.launch.operations import Operations
from bireme.scaling.plan_record import PlannedStage, PlanRecord
from bireme.scaling.planner_metrics import PlannerMetrics
from tests.launch.fake_launch import FakeLaunch
from tools import plan

KEY = "0123456789abcdef0123"


def record(result="up", reason="12.00 requests/s need 3+1", **fields):
    stages = {
        "prefill": PlannedStage(ready=1, starting=1, ending=1, wanted=3),
        "decode": PlannedStage(ready=1, starting=0, ending=0, wanted=1),
    }
    told = {"at": 1000.0, "acts": True, "max_gpus": 4, "interval_s": 60.0, "stages": stages, "requests_per_s": 12.0}
    return PlanRecord(result=result, reason=reason, **(told | fields))


@pytest.fixture
def metrics():
    made = PlannerMetrics("127.0.0.1", 0)
    made.start()
    yield made
    made.stop()


def page(metrics, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}{path}", timeout=20) as reply:
        return reply.read().decode().splitlines()


def test_sizes_budget_and_results_are_metrics(metrics):
    metrics.count(record())
    metrics.count(record("same", failure="decode_1 is the last"))
    found = page(metrics)
    for line in (
        'bireme_planner_workers{stage="prefill",state="starting",worker="planner"} 1.0',
        'bireme_planner_workers_wanted{stage="prefill",worker="planner"} 3.0',
        'bireme_planner_decisions_total{result="up",worker="planner"} 1.0',
        'bireme_planner_failures_total{worker="planner"} 1.0',
        'bireme_planner_budget_gpus{worker="planner"} 4.0',
        'bireme_planner_requests_per_second{worker="planner"} 12.0',
    ):
        assert line in found
    with pytest.raises(urllib.error.HTTPError, match="404"):
        page(metrics, "/")


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("hold: missing: http://a:8004: no admin door answers there", "missing"),
        ("hold: clocks apart: launch is 600 s ahead of this host", "clocks_apart"),
        ("hold: contradictory: 1 decode workers are ready", "contradictory"),
        ("hold: of a kind that nobody knows", "other"),
    ],
)
def test_holds_are_counted_by_the_word_that_begins_the_reason(metrics, reason, cause):
    metrics.count(record("hold", reason, stages={}, requests_per_s=None))
    assert f'bireme_planner_holds_total{{cause="{cause}",worker="planner"}} 1.0' in page(metrics)


def test_a_port_that_is_taken_is_refused_by_name(metrics):
    with pytest.raises(ConfigError, match=f"--metrics-port {metrics.port}: 127.0.0.1 can't be listened on"):
        PlannerMetrics("127.0.0.1", metrics.port)


@pytest.fixture
def door(tmp_path):
    (tmp_path / "key").write_text(KEY)
    console = Console("info", stream=io.StringIO())
    settings = AdminSettings(port=0, key_file=str(tmp_path / "key"))
    opened = AdminDoor(settings, Operations(FakeLaunch(tmp_path), console), console)
    opened.start()
    yield DoorClient(f"http://127.0.0.1:{opened.port}", KEY)
    opened.stop()


def test_the_last_decisions_are_noted_at_the_door_the_newest_first(door, tmp_path):
    for number in range(25):
        plan.note_at(door, record(reason=f"decision {number}"))
    found = plan_notes.read(tmp_path)
    assert len(found) == 20 and "decision 24" in found[0].text and "prefill 1 and 1 starting" in found[0].text
    assert found[0] == PlanNote(at=1000.0, result="up", acts=True, text=record(reason="decision 24").line())


def test_a_note_of_another_form_is_refused(door, tmp_path):
    with pytest.raises(BiremeError, match="body: .*text"):
        door.post("/plan", at=1.0, result="up", acts=True, text="x" * 2001)
    assert plan_notes.read(tmp_path) == []
