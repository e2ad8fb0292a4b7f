"""tools/plan.py on a launch that runs: the load doubles, halves and ends, and workers follow without a lost request."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter

import pytest

from bireme.launch import free_port
from bireme.launch.admin_client import DoorClient
from tests.server.openai_served import five_ports, served

pytestmark = pytest.mark.server
KEY = "the-operator-s-own-key"
LIMIT_S, INTERVAL_S, BUDGET = 60, 3.0, 4
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
    def __init__(self, folder, running, admin):
        self.folder, self.url = folder, running.url
        self.door = DoorClient(f"http://127.0.0.1:{admin}", KEY)
        self.answers, self._asking = [], []
        self._number = 0

    def awake(self):
        """Return stage -> workers that hold a GPU."""
        workers = self.door.status()["workers"]
        return Counter(name.partition("_")[0] for name, one in workers.items() if one["state"] != "asleep")

    def load(self, per_s, seconds):
        """Send so many requests a second, none of which waits for another one's answer."""
        for _ in range(int(per_s * seconds)):
            began = time.monotonic()
            self._asking.append(threading.Thread(target=self._ask, args=(self._number,)))
            self._number += 1
            self._asking[-1].start()
            time.sleep(max(1 / per_s - (time.monotonic() - began), 0.0))

    def end(self):
        for thread in self._asking:
            thread.join(LIMIT_S)

    def _ask(self, number):
        prompt = [3 + (7 * number + at) % 900 for at in range(100)]  # none begins as another one
        body = {"model": "mocker-disagg", "prompt": prompt, "max_tokens": 8, "bireme": {"ignore_eos": True}}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
                self.answers.append(json.load(reply)["usage"]["completion_tokens"])
        except OSError as error:
            self.answers.append(str(error))


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
            (launch.folder / "planner.yaml").write_text(json.dumps(SETTINGS | changes))
            process = _started(launch)
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
        *("--recipe=recipes/mocker-disagg", *settings_words(*MOCKERS)),
        *(f"--settings={launch.folder}/planner.yaml", f"--log={launch.folder}/decisions.jsonl"),
    ]
    with (launch.folder / "plan.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def decisions(launch):
    path = launch.folder / "decisions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_workers_follow_a_load_that_doubles_halves_and_ends(launch, planner):
    wait_for(lambda: launch.awake() == {"prefill": 1, "decode": 1})  # of five, as there is no load
    num_before = len(decisions(launch))
    most, is_over = Counter(), threading.Event()

    def watch():
        while not is_over.wait(0.3):
            most["workers"] = max(most["workers"], sum(launch.awake().values()))

    watching = threading.Thread(target=watch)
    watching.start()
    launch.load(2, 6)
    launch.load(4, 12)
    launch.load(2, 21)
    launch.end()
    ended_at = time.time()
    wait_for(lambda: [one["at"] for one in decisions(launch)][-1] > ended_at + 3 * INTERVAL_S)
    is_over.set()
    watching.join(LIMIT_S)
    planner.send_signal(signal.SIGINT)
    assert planner.wait(LIMIT_S) == 0

    assert launch.answers == [8] * 102  # none failed, none is short
    wanted = [one["stages"]["prefill"]["wanted"] for one in decisions(launch)[num_before:]]
    peak = wanted.index(max(wanted))
    assert wanted[peak] == 3 and 2 in wanted[:peak] and 2 in wanted[peak:] and wanted[-1] == 1
    assert 3 <= most["workers"] <= BUDGET
    after = [one["stages"] for one in decisions(launch) if one["at"] > ended_at]
    assert {stage: one["wanted"] for stage, one in after[2].items()} == {"prefill": 1, "decode": 1}
    assert all(one["reason"] and not one.get("failure") for one in decisions(launch))


def test_a_planner_that_is_stopped_leaves_the_deployment_as_it_is(launch):
    assert launch.awake() == {"prefill": 1, "decode": 1}
    launch.load(4, 1)
    launch.end()
    assert launch.answers[-4:] == [8] * 4


def test_a_launch_of_which_all_workers_sleep_wakes_for_the_first_request(launch, planner_of):
    none = {"minimum": 0}
    planner_of(prefill=none, decode=none, reversal_s=0)
    wait_for(lambda: not launch.awake())
    launch.load(1, 1)
    launch.end()
    assert launch.answers[-1] == 8 and launch.awake() == {"prefill": 1, "decode": 1}
