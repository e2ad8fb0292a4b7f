"""tools/plan.py --aggregated on a launch whose workers do both: they follow a load without a lost request."""

import pytest

from bireme.launch import free_port
from tests.server.openai_served import five_ports, served
from tests.server.test_planner_at_work import BUDGET, KEY, Launch, most_awake, planner_of, settings_words

__all__ = ["planner_of"]  # a fixture
pytestmark = pytest.mark.server
MOCKERS = (
    "workers.decode.engine_config.mocker.prefill_ms=150",
    "workers.decode.engine_config.mocker.step_ms=20",
)


class AggregatedLaunch(Launch):
    recipe, mockers, more = "mocker", MOCKERS, ("--aggregated",)


@pytest.fixture(scope="module")
def launch(sample_model, tmp_path_factory):
    sample_model("llama")
    folder, admin = tmp_path_factory.mktemp("aggregated"), free_port()
    (folder / "key").write_text(KEY)
    settings = settings_words(*MOCKERS, "workers.decode.replicas=3")
    options = [*settings, f"--admin-port={admin}", f"--admin-key-file={folder / 'key'}"]
    with served("recipes/mocker", folder / "log", *options, ports=five_ports()) as running:
        yield AggregatedLaunch(folder, running, admin)


def test_workers_that_do_both_follow_a_load(launch, planner_of):
    planner_of()
    launch.wait_for(lambda: launch.awake() == {"decode": 1})
    num_before = len(launch.wanted())
    with most_awake(launch) as most:
        launch.load.send(4, until=lambda: max(launch.wanted()[num_before:], default=0) > 1)
        launch.load.send(4, until=lambda: most[-1] > 1)
        launch.load.end()
        launch.wait_for(lambda: launch.awake() == {"decode": 1} and launch.wanted()[-1] == 1)
    assert most[-1] <= BUDGET and all(one["reason"] for one in launch.decisions())
