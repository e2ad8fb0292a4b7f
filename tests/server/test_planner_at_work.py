"""tools/plan.py on a launch that runs: the load doubles, halves and ends, and workers follow without a lost request.

What holds on a machine however busy; which sizes follow from which load is exact where time is played
(tests/planner, tests/scaling).
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from bireme.launch import free_port
from bireme.launch.admin_client import DoorClient
from tests.server.openai_served import five_ports, served
from tests.server.steady_load import LIMIT_S, SteadyLoad

pytestmark = pytest.mark.server
KEY = "the-operator-s-own-key"
INTERVAL_S, BUDGET = 3.0, 4
# A prompt takes 150 ms: of 2 requests a second one worker can't do all within the target, of 4 two can't.
MOCKERS = (
    "workers.prefill.engine_config.mocker.prefill_ms=150",
    "workers.decode.engine_config.mocker.step_ms=20",
)
REPLICAS = ("workers.prefill.replicas=3", "workers.decode.replicas=2")
SETTINGS = {
    "ttft_ms": 600, "itl_ms": 100, "max_gpus": BUDGET, "interval_s": INTERVAL_S, "start_s": 2, "reversal_s": 9,
    "down_window_s": 6,
}  # fmt: skip


def settings_words(*settings):
    return [word for setting in settings for word in ("--set", setting)]


class Launch:
    recipe, mockers, more = "mocker-disagg", MOCKERS, ()

    def __init__(self, folder, running, admin):
        self.folder, self.url = folder, running.url
        self.door = DoorClient(f"http://127.0.0.1:{admin}", KEY, timeout_s=LIMIT_S)
        self.planner = None
        self.begin_anew()

    def begin_anew(self):
        """Forget what another test has seen, or this one at its first try."""
        self.load = SteadyLoad(self.url, self.recipe)
        (self.folder / "decisions.jsonl").unlink(missing_ok=True)

    def awake(self):
        """Return stage -> workers that hold a GPU."""
        workers = self.door.status()["workers"]
        return Counter(name.partition("_")[0] for name, one in workers.items() if one["state"] != "asleep")

    def decisions(self):
        path = self.folder / "decisions.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wanted(self):
        """Return how many are to compute prompts, decision by decision; a hold without sizes has none."""
        stage = "prefill" if "disagg" in self.recipe else "decode"
        return [one["stages"][stage]["wanted"] for one in self.decisions() if one["stages"]]

    def wait_for(self, condition):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            log = (self.folder / "plan.log").read_text()
            assert self.planner.poll() is None, f"the planner has ended with {self.planner.returncode}:\n{log}"
            assert time.monotonic() < deadline, f"the planner says:\n{log}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def launch(sample_model, tmp_path_factory):
    sample_model("llama")
    folder = tmp_path_factory.mktemp("planned")
    (folder / "key").write_text(KEY)
    admin = free_port()
    options = [*settings_words(*MOCKERS, *REPLICAS), f"--admin-port={admin}", f"--admin-key-file={folder / 'key'}"]
    with served("recipes/mocker-disagg", folder / "log", *options, ports=five_ports()) as running:
        yield Launch(folder, running, admin)


@pytest.fixture
def planner_of(launch):
    """Return a function that starts the planner, with these settings changed."""
    with contextlib.ExitStack() as stack:

        def start(**changes):
            launch.begin_anew()
            (launch.folder / "planner.yaml").write_text(json.dumps(SETTINGS | changes))
            launch.planner = process = _started(launch)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def planner(planner_of):
    return planner_of()


def _started(launch):
    command = [
        *(sys.executable, "tools/plan.py", f"--admin={launch.door.address}", f"--admin-key-file={launch.folder}/key"),
        *(f"--recipe=recipes/{launch.recipe}", *settings_words(*launch.mockers), *launch.more),
        *(f"--settings={launch.folder}/planner.yaml", f"--log={launch.folder}/decisions.jsonl"),
    ]
    with (launch.folder / "plan.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


@contextlib.contextmanager
def most_awake(launch):
    """Yield a list that ends with the most workers that were seen to hold a GPU at once."""
    seen, is_over = [0], threading.Event()

    def watch():
        while not is_over.wait(0.3):
            seen.append(max(seen[-1], sum(launch.awake().values())))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield seen
    finally:
        is_over.set()
        watching.join(LIMIT_S)


LEAST = {"prefill": 1, "decode": 1}


def test_workers_follow_a_load_that_doubles_halves_and_ends(launch, planner):
    launch.wait_for(lambda: launch.awake() == LEAST)  # of five, as there is no load
    num_before = len(launch.wanted())
    with most_awake(launch) as most:
        launch.load.send(2, until=lambda: max(launch.wanted()[num_before:], default=0) > 1)
        launch.load.send(4, 12)
        launch.load.send(2, 12)
        launch.load.end()
        launch.wait_for(lambda: launch.awake() == LEAST and launch.wanted()[-1] == 1)
    planner.send_signal(signal.SIGINT)
    assert planner.wait(LIMIT_S) == 0
    assert 3 <= most[-1] <= BUDGET
    decisions = launch.decisions()
    assert all(one["reason"] for one in decisions)
    assert all(sum(stage["wanted"] for stage in one["stages"].values()) <= BUDGET for one in decisions)


def test_a_planner_that_is_stopped_leaves_the_deployment_as_it_is(launch, planner):
    launch.wait_for(lambda: launch.decisions() and launch.awake() == LEAST)
    planner.send_signal(signal.SIGTERM)
    assert planner.wait(LIMIT_S) == 0
    assert launch.awake() == LEAST
    launch.load.send(4, 1)
    launch.load.end()


def test_a_launch_of_which_all_workers_sleep_wakes_for_the_first_request(launch, planner_of):
    none = {"minimum": 0}
    planner_of(prefill=none, decode=none, reversal_s=0)
    launch.wait_for(lambda: not launch.awake())
    launch.load.send(1, 1)
    launch.load.end()
    assert launch.awake() == LEAST
    launch.wait_for(lambda: not launch.awake())


def test_a_planner_that_comes_to_a_launch_whose_workers_sleep_wakes_some_to_learn_what_they_can_do(launch, planner_of):
    none = {"minimum": 0}
    first = planner_of(prefill=none, decode=none, reversal_s=0)
    launch.wait_for(lambda: launch.decisions() and not launch.awake())
    first.kill()
    first.wait()
    planner_of(reversal_s=0)
    launch.wait_for(lambda: launch.decisions() and launch.awake() == LEAST)
    launch.load.send(2, until=lambda: max(launch.wanted(), default=0) > 1)  # sized by limits that are above 0
    launch.load.end()
