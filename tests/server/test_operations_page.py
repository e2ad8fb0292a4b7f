"""docs/operations.md: each block of commands is run on one launch of its recipe, as it stands but for the ports.

What a block must say is in the check of its first line. Above one that needs a cluster or a second machine the page
names the test that runs it: <!-- run by tests/... -->. One with neither fails.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from bireme import metrics
from bireme.launch import free_port

pytestmark = pytest.mark.server
CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "operations.md").read_text()
FOUND = re.findall(r"^(?:<!-- run by (\S+) -->\n)?```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
BLOCKS = [(kind, block) for test, kind, block in FOUND if not test]
ELSEWHERE = [test for test, _, _ in FOUND if test]
COMMANDS = {block.partition("\n")[0]: block for kind, block in BLOCKS if not kind}
PORTS = {"8000": "http", "8001": "grpc", "8002": "metrics", "8003": "health", "8004": "admin", "9000": "openai"}
START = "python tools/serve.py served --admin-port 8004 --admin-key-file admin.key --api-keys keys.yaml"
FIRST = ("mkdir -p served/log", "(umask 077 && openssl rand -hex 32 > admin.key)", START)
CHECKED = START.replace("served", "served --check")
ASKED = "curl -s http://127.0.0.1:8003/health/ready"
FOUND_BY = "export BIREME_ADMIN=http://127.0.0.1:8004 BIREME_ADMIN_KEY=$(cat admin.key)"
LIMIT_S = 300

CHECKS = {}


def says(first_line):
    """Register what the block that begins so must have said and done; `code`: its exit code."""

    def add(check):
        CHECKS[first_line] = check
        return check

    return add


class Launch:
    """A folder in which an operator works, and what runs of it."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "serve.log"
        self.ports = {number: str(free_port()) for number in PORTS}
        self.environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for path in ("tools", "bireme", "benchmarks", "recipes", "models"):
            (folder / path).symlink_to(CHECKOUT / path)
        (folder / "served").mkdir()
        (folder / "served" / "recipe.yaml").write_text(next(block for kind, block in BLOCKS if kind == "yaml"))
        self.process = None

    def run(self, block):
        """Return it once it has ended, with what it said on both outputs."""
        given = COMMANDS.get(FOUND_BY, "") if self.process else ""
        return subprocess.run(
            ["bash", "-c", self.own_ports(given + block)], cwd=self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def own_ports(self, text):
        return re.sub(rf"(?<=[: ])({'|'.join(PORTS)})\b", lambda found: self.ports[found[1]], text)

    def served(self, block):
        """Return the command with ports of its own for what it leaves out."""
        ports = [f"--{name}-port {self.ports[number]}" for number, name in PORTS.items() if name != "admin"]
        return f"{self.own_ports(block).strip()} {' '.join(ports)}"

    def start(self, block):
        command = f"exec {self.served(block)} --canary-interval 0"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", command], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        self.wait_for(lambda: "serve  | ready" in self.log.read_text())

    def wait_for(self, condition):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.05)

    def state_of(self, worker):
        """Return what the launch's health says of it."""
        address = f"http://127.0.0.1:{self.ports['8003']}/health/ready"
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(address, timeout=LIMIT_S) as reply:
            return json.load(reply)["workers"][worker]

    def models_for(self, key):
        """Return the status with which this key is answered."""
        address = f"http://127.0.0.1:{self.ports['9000']}/v1/models"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    def end(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def launch(tmp_path_factory, sample_model):
    """It has done what comes before the first start, runs, and has answered a request."""
    sample_model("llama")
    launch = Launch(tmp_path_factory.mktemp("operator"))
    try:
        checked, keys = launch.run(COMMANDS[FIRST[0]]), launch.run(COMMANDS[FIRST[1]])
        assert checked.returncode == keys.returncode == 0, checked.stdout + keys.stdout
        assert "served/recipe.yaml: " not in checked.stdout
        machine = launch.run(launch.served(COMMANDS[CHECKED]))
        assert machine.returncode == 0 and "checked recipe=served" in machine.stdout, machine.stdout
        launch.environment["KEY"] = key_in(keys.stdout)
        launch.start(COMMANDS[START])
        launch.run(COMMANDS[ASKED])
        launch.wait_for(lambda: any(file.stat().st_size for file in (launch.folder / "served" / "log").glob("*.jsonl")))
        yield launch
    finally:
        launch.end()


def key_in(text):
    return re.search(r"shown this once: (\S+)", text)[1]


def reports(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"event": "report"')]


@says(ASKED)
def ready_and_answered(done, launch):
    health, answer = map(json.loads, re.findall(r"\{.*?\}(?=\{\"id\"|\s*$)", done.stdout, re.DOTALL))
    assert health["status"] == "ready" and answer["usage"]["completion_tokens"] == 8


@says(FOUND_BY)
def found(done, launch):
    assert done.returncode == 0


@says("python tools/status.py")
def told_what_is_under_way(done, launch):
    assert "decode_1 " in done.stdout and "safe to delete: no" in done.stdout
    for name in ("engine_up", "requests_running", "requests_waiting", "kv_blocks_used"):
        assert re.search(rf'^bireme_{name}{{worker="decode"}} \d', done.stdout, re.MULTILINE)


@says("python tools/status.py --log-level debug")
def changed_and_changed_back(done, launch):
    assert '"log_level": "debug"' in done.stdout and '"max_kv_usage": 0.9' in done.stdout
    assert "changed while it runs" not in done.stdout.rpartition("safe to delete")[0].rpartition("safe to delete")[2]


@says("python tools/make_api_key.py bob > entry && cat keys.yaml entry > keys.new && mv keys.new keys.yaml")
def a_new_client_gets_in_without_a_restart(done, launch):
    assert launch.models_for("not-" + key_in(done.stdout)) == 401
    launch.wait_for(lambda: launch.models_for(key_in(done.stdout)) == 200)
    assert launch.models_for(launch.environment["KEY"]) == 200


@says("python tools/drain.py decode_1")
def drained_and_back(done, launch):
    assert "decode_1 drains" in done.stdout and "decode_1 takes requests again" in done.stdout
    assert re.search(r"decode_1 .* draining$", done.stdout, re.MULTILINE)


@says("python tools/sleep.py decode_1")
def asleep_and_awake(done, launch):
    assert "decode_1 goes to sleep" in done.stdout and "decode_1 wakes" in done.stdout
    launch.wait_for(lambda: (launch.state_of("decode_1") or {}).get("ready"))


@says("python tools/chaos.py --plan 5 --seed 7")
def a_plan(done, launch):
    assert len(done.stdout.splitlines()) >= 5


@says("tail -n 1 served/log/requests.frontend.jsonl")
def the_last_request(done, launch):
    line = json.loads(done.stdout)
    assert line["request"]["output_tokens"] == 8 and line["bireme"]["key"] == "alice", done.stdout


@says("python tools/drain.py --all --wait 600")
def may_be_ended(done, launch):
    assert done.returncode == 0 and "safe to delete: yes" in done.stdout


@says("python tools/drain.py --all --undo")
def serves_again(done, launch):
    launch.wait_for(lambda: (launch.state_of("decode") or {}).get("ready"))


@says("mkdir -p backup")
def copied(done, launch):
    assert done.returncode == 0, done.stdout
    kept = {path.name for path in (launch.folder / "backup").iterdir()}
    assert kept == {"keys.yaml", "recipe.yaml", "files.sqlite", "responses.sqlite", "content"}
    assert all(path.stat().st_size for path in (launch.folder / "backup").glob("*.sqlite"))


@says(
    "python -m benchmarks.load decode --target 127.0.0.1:8001 --seconds 2 --warmup-s 0.5 --streams 1 --prompt-tokens 16"
)
def the_pace_that_the_mocker_was_told(done, launch):
    """At least: a busy machine only adds to it."""
    alone, many, long = reports(done.stdout)
    assert not (alone["errors"] or many["errors"] or long["errors"])
    assert alone["itl_p50_ms"] >= 4.9 and many["itl_p50_ms"] >= 5.5 and long["ttft_p50_ms"] >= 100


@says(next((line for line in COMMANDS if line.startswith("python tools/simulate.py multi_turn")), ""))
def as_the_page_shows(done, launch):
    (shown,) = (block for kind, block in BLOCKS if kind == "text")
    table = [line.split() for line in shown.splitlines()]
    assert table == [line.split() for line in done.stdout.splitlines()[-1 - len(table) : -1]]  # behind its progress


@says(next((line for line in COMMANDS if line.startswith("python tools/simulate.py served/")), ""))
def own_traffic(done, launch):
    assert [row["workers"] for row in json.loads(done.stdout.splitlines()[-1])["rows"]] == [1, 2]


def test_every_block_is_run_here_or_by_the_test_that_is_named():
    known = [*FIRST, CHECKED, *CHECKS]
    assert [line for line in COMMANDS if line not in known] == [], "say here what it must say, or there who runs it"
    assert [line for line in known if line not in COMMANDS] == [], "it is not in the page any more"
    assert len(COMMANDS) == sum(not kind for kind, _ in BLOCKS), "two blocks begin alike"
    assert ELSEWHERE and all((CHECKOUT / test).is_file() for test in ELSEWHERE)


@pytest.mark.parametrize("first_line", [line for line in COMMANDS if line in CHECKS])
def test_a_block_does_what_the_page_says(first_line, launch):
    done = launch.run(COMMANDS[first_line])
    CHECKS[first_line](done, launch)


def test_metrics_that_the_page_names_exist():
    named = set(re.findall(r"`(bireme_[a-z_]+)", PAGE))
    assert named - metrics.TABLE.keys() == set() and len(named) > 5
