"""What slowed a request is told by its timeline alone, for each of five causes."""

import pytest

from tests.server.slow_requests import slow_requests

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with slow_requests(tmp_path_factory.mktemp("slow")) as requests:
        yield requests


def steps(timeline, name):
    calls = [one[stage] for one in timeline["attempts"] for stage in ("prefill", "decode") if one[stage]]
    return [step for call in calls for step in call["steps"] if step["name"] == name]


def test_a_request_that_waited_for_a_place_in_the_batch(made):
    timeline = made.queue()
    assert timeline["slowest"] == "queue", timeline["causes"]
    assert steps(timeline, "queue")[0]["end_ms"] - steps(timeline, "queue")[0]["start_ms"] > 800


def test_a_request_beside_which_a_long_prompt_was_computed(made):
    timeline = made.neighbors()
    assert timeline["slowest"] == "neighbors", timeline["causes"]
    assert steps(timeline, "generate")[0]["neighbor_tokens"] == 2000
    assert timeline["tokens"][0]["longest_gap_ms"] > 1900


def test_a_request_whose_kv_came_late(made):
    timeline = made.transfer()
    assert timeline["slowest"] == "transfer", timeline["causes"]
    assert steps(timeline, "transfer")[0]["bytes"] > 0


def test_a_request_whose_engine_was_killed(made):
    timeline = made.migration()
    assert timeline["slowest"] == "migration", timeline["causes"]
    assert len(timeline["attempts"]) > 1 and timeline["attempts"][0]["error"].startswith("UNAVAILABLE")
    assert timeline["generated_tokens"] == 600


def test_a_request_whose_client_did_not_read(made):
    timeline = made.reader()
    assert timeline["slowest"] == "reader", timeline["causes"]
    assert timeline["delivery"]["waits"] and timeline["delivery"]["waited_ms"] > 1000
