"""tools/update.py, under load: a generation takes another one's place, or is found not to be fit for it."""

import contextlib
import itertools
import json
import os
import secrets
import shlex
import signal
import subprocess
from subprocess import PIPE

import pytest

from tests.server.generations.rolling_turns import (
    KEY,
    LIMIT_S,
    NUM_TOKENS,
    PROMPTS,
    Clients,
    Generation,
    Revision,
    before_the_door,
    mocked,
    of_weights,
    update,
    update_command,
    wait_for,
)
from tests.server.generations.shared_generations import CONTEXT
from tools.make_sample_model import make

pytestmark = pytest.mark.server
QUICK = ("--mirror", "1", "--min-compared", "20", "--pause", "1", "--max-ttft-ratio", "100")
FEW = {"num_clients": 2, "pause_s": 0.05}  # the soak has more
REVISION, OTHER, NUM_TURNS = mocked(30000), mocked(20000), int(os.environ.get("TURNS", "20"))
REAL = range(9, 13)  # turns to a real engine, of two revisions


LONG = tuple(range(1000, 1000 + CONTEXT - NUM_TOKENS // 2))  # the new generation's context ends in its answer


@pytest.fixture(scope="module")
def old(generations):
    return generations.old


@pytest.fixture
def new(generations):
    """Outside of the balancer, whatever the test before has left."""
    old, new = generations.old, generations.new
    old.door.post("/undrain")
    old.door.post("/mirror", url=None)
    new.door.post("/weight", weight=0)
    new.door.post("/drain")
    wait_for(lambda: has_its_place(old, new))
    return new


@pytest.fixture(scope="module")
def known(old):
    return {prompt: {old.ask(prompt)} for prompt in PROMPTS}


def started(new):
    return ("--start", shlex.join(new.command), "--log", str(new.log))


def has_its_place(old, new):
    """The old one serves alone."""
    told = [launch.door.status() for launch in (old, new)]
    is_taken_back = [(one["draining"], one["mirror"]) for one in told] == [(False, None), (True, None)]
    return is_taken_back and told[1]["weight"] == 0 and old.is_ready() and not new.is_ready()


def test_one_that_never_gets_ready_is_not_taken(old, known):
    new = Generation(old.folder, REVISION)
    with Clients([old, new], known, **FEW) as clients:
        code, result, told = update(old, new, "--start", "sleep 600", "--log", str(new.log), "--ready-limit", "1")
    assert code == 1 and "the new generation was not ready within 1 s" in result["reason"], told
    assert clients.problems == [] and old.is_ready()


def test_one_that_answers_differently_is_found_and_not_taken(old, new):
    with Clients([old, new], {LONG: {old.ask(LONG)}}, **FEW) as clients:
        code, result, told = update(old, new, *QUICK)
    assert code == 1 and "the new generation answers differently: " in result["reason"], told
    assert "choices[0].text: they differ at " in result["reason"] and has_its_place(old, new)
    assert clients.problems == [] and clients.served.keys() == {old.ports["openai"]}


def test_ctrl_c_among_the_weights_has_the_old_one_take_everything_again_and_so_has_back(old, new, known):
    waits = ("--mirror", "0", "--steps", "0.5,1", "--pause", "600")
    with Clients([old, new], known, **FEW) as clients:
        running = subprocess.Popen(
            update_command(old, new, *waits), stdout=PIPE, stderr=PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # behind a script it would be ignored
        )  # fmt: skip
        told = list(itertools.takewhile(lambda line: line != "update: weight 0.5\n", running.stderr))
        wait_for(lambda: new.door.status()["shares"] == {"1": 0.5, "0": 0.5})
        running.send_signal(signal.SIGINT)
        result, rest = running.communicate(timeout=LIMIT_S)
        assert running.returncode == 1 and json.loads(result)["reason"] == "it was interrupted", [*told, rest]
        assert rest.endswith("update: the old generation takes all requests\n")
        wait_for(lambda: has_its_place(old, new))
        assert update(old, new, "--back")[0] == 1 and has_its_place(old, new)  # as often as one likes
    assert clients.problems == []


def test_one_that_answers_the_same_takes_the_place_and_back_brings_the_old_one_again(old, new, known):
    with Clients([old, new], known, **FEW) as clients:
        code, result, told = update(old, new, *QUICK)
        assert code == 0 and result["by"] == "weights", told
        assert result["compared"]["same"] >= 20 and result["compared"]["different"] == result["compared"]["failed"] == 0
        assert old.door.status()["safe_to_delete"] and not old.is_ready()
        assert update(old, new, "--back")[0] == 1
        wait_for(lambda: has_its_place(old, new))
    assert clients.problems == [] and clients.served.keys() == {old.ports["openai"], new.ports["openai"]}


def test_an_old_one_that_is_still_at_work_after_the_limit_is_told(old, new):
    wait_for(lambda: not old.door.status()["in_flight_requests"])  # metrics of the test before come a moment later
    with old.streaming_itself():
        code, result, told = update(old, new, "--mirror", "0", "--pause", "0", "--drain-limit", "0")
        assert code == 3 and result["taken"] and not result["is_old_safe"], told
        assert "update: the new generation serves, and the old one is still at work: " in told
        assert any("under way" in reason for reason in result["left"]), result["left"]
    wait_for(lambda: old.door.status()["safe_to_delete"])


@pytest.mark.soak
def test_launches_that_share_a_discovery_hand_over_by_weights(sample_model, tmp_path, monkeypatch):
    sample_model("llama")
    (tmp_path / "key").write_text(KEY)
    monkeypatch.setenv("BIREME_KEY", secrets.token_hex(32))
    shared = [f"--discovery={tmp_path / 'shared'}", "--weight=0"]
    old, new = (Generation(tmp_path, REVISION, arguments=(*shared, f"--generation={number}")) for number in (1, 2))
    process = old.start()
    pids = [process.pid]
    try:
        known = {prompt: {old.ask(prompt)} for prompt in PROMPTS}
        with Clients([old, new], known) as clients:
            code, result, told = update(old, new, *started(new), *QUICK)
            assert code == 0, told + new.log.read_text()
            pids.append(result["pid"])
            assert result["by"] == "weights" and result["compared"]["same"] >= 20
            end(process.pid)
            wait_for(lambda: not old.is_ready())
        assert clients.problems == [] and clients.served.keys() == {old.ports["openai"], new.ports["openai"]}
    finally:
        for pid in pids:
            end(pid)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_turns_over_two_servers_with_changing_versions_and_revisions_lose_nothing(sample_model, tmp_path):
    """Each fourth launch is of the last version without an admin door; revisions change with every second turn.

    In two turns the new one is not fit, and the turn after it goes on from where the turns were.
    """
    models = [sample_model("llama"), make(tmp_path / "other-weights", seed=1)]
    (tmp_path / "key").write_text(KEY)
    before, known = before_the_door(tmp_path / "before"), {prompt: set() for prompt in PROMPTS}
    mocks, weights = (REVISION, OTHER), tuple(map(of_weights, models))
    for revision in (*weights, *mocks):
        now = Generation(tmp_path, revision, before, has_door=False)
        process = now.start()
        for prompt in PROMPTS:
            known[prompt].add(now.ask(prompt))
        if revision != mocks[-1]:
            end(process.pid)
    assert {len(answers) for answers in known.values()} == {4}
    pid, num_served = process.pid, 1
    try:
        with Clients([now], known) as clients:
            for turn in range(1, NUM_TURNS + 1):
                is_before, revision = turn % 4 == 0, (weights if turn in REAL else mocks)[turn // 2 % 2]
                newer = Generation(tmp_path, revision, *((before, False) if is_before else ()))
                if turn in UNFIT:
                    UNFIT[turn](now, newer)
                else:
                    clients.entries.append(newer)
                    pid_before, pid = pid, change_places(now, newer)
                    end(pid_before)
                    wait_for(lambda now=now: not now.is_ready())
                    clients.entries.remove(now)
                    now, num_served = newer, num_served + 1
                assert clients.problems == [], turn
        assert len(clients.served) == num_served
    finally:
        end(pid)


def offer_another_revision(now, newer):
    newer.revision = OTHER if now.revision != OTHER else REVISION
    code, result, told = update(now, newer, *started(newer), *QUICK)
    assert code == 1 and "the new generation answers differently: " in result["reason"], told + newer.log.read_text()
    assert not result["problems"] and now.is_ready() and not newer.is_ready()


def offer_one_that_never_gets_ready(now, newer):
    """Its engine takes an hour to load."""
    slow = "workers.decode.engine_config.mocker.load_ms=3600000"
    newer.revision = Revision("recipes/mocker", (*REVISION.settings, slow))
    code, result, told = update(now, newer, *started(newer), *QUICK, "--ready-limit", "20")
    assert code == 1 and "the new generation was not ready within 20 s: " in result["reason"], told
    assert not result["problems"] and now.is_ready() and not newer.is_ready()


UNFIT = {7: offer_another_revision, 14: offer_one_that_never_gets_ready}  # turns after one with a door


def change_places(now, newer):
    """Return the process of the newer one, which serves; nothing goes to the other one any more."""
    if now.has_door and newer.has_door:
        allowed = ("--max-different", "1") if newer.revision != now.revision else ()
        code, result, told = update(now, newer, *started(newer), *QUICK, *allowed)
        assert code == 0, told + newer.log.read_text()
        return result["pid"]
    process = newer.start()
    if now.has_door:
        now.door.post("/drain")
        wait_for(lambda: now.door.status()["safe_to_delete"])
    return process.pid


def end(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
