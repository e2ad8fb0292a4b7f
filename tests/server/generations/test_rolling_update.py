"""tools/update.py, under load: a generation takes another one's place, or is found not to be fit for it."""

import contextlib
import os
import secrets
import shlex
import signal

import pytest

from tests.server.rolling_turns import (
    KEY,
    PROMPTS,
    Clients,
    Generation,
    Revision,
    before_the_door,
    mocked,
    of_weights,
    update,
    wait_for,
)
from tools.make_sample_model import make

pytestmark = pytest.mark.server
QUICK = ("--mirror", "1", "--min-compared", "20", "--pause", "1", "--max-ttft-ratio", "100")
REVISION, OTHER, NUM_TURNS = mocked(30000), mocked(20000), int(os.environ.get("TURNS", "20"))
REAL = range(9, 13)  # turns to a real engine, of two revisions


@pytest.fixture(scope="module")
def old(sample_model, tmp_path_factory):
    sample_model("llama")
    folder = tmp_path_factory.mktemp("rolling")
    (folder / "key").write_text(KEY)
    running = Generation(folder, REVISION)
    process = running.start()
    yield running
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.wait(60)


@pytest.fixture(scope="module")
def known(old):
    return {prompt: {old.ask(prompt)} for prompt in PROMPTS}


def started(new):
    return ("--start", shlex.join(new.command), "--log", str(new.log))


def test_one_that_never_gets_ready_is_not_taken(old, known):
    new = Generation(old.folder, REVISION)
    with Clients([old, new], known) as clients:
        code, result, told = update(old, new, "--start", "sleep 600", "--log", str(new.log), "--ready-limit", "1")
    assert code == 1 and "the new generation was not ready within 1 s" in result["reason"], told
    assert clients.problems == [] and old.is_ready()


def test_one_that_answers_differently_is_found_and_not_taken(old, known):
    new = Generation(old.folder, OTHER)
    with Clients([old, new], known) as clients:
        code, result, told = update(old, new, *started(new), *QUICK)
    assert code == 1 and "the new generation answers differently: " in result["reason"], told + new.log.read_text()
    assert "choices[0].text: they differ at 0 of " in result["reason"]
    assert clients.problems == [] and clients.served.keys() == {old.ports["openai"]}
    assert old.door.status()["mirror"] is None and old.is_ready()


def test_one_that_answers_the_same_takes_the_place_and_back_brings_the_old_one_again(old, known):
    new = Generation(old.folder, REVISION)
    with Clients([old, new], known) as clients:
        code, result, told = update(old, new, *started(new), *QUICK)
        assert code == 0, told + new.log.read_text()
        try:
            assert result["taken"] and result["compared"]["different"] == result["compared"]["failed"] == 0
            assert old.door.status()["safe_to_delete"] and not old.is_ready()
            for _ in range(2):  # as often as one likes
                assert update(old, new, "--back")[0] == 1
            wait_for(lambda: old.is_ready() and not new.is_ready())
        finally:
            os.kill(result["pid"], signal.SIGTERM)
    assert clients.problems == [] and clients.served.keys() == {old.ports["openai"], new.ports["openai"]}


@pytest.mark.soak
def test_launches_that_share_a_discovery_hand_over_by_weights(sample_model, tmp_path, monkeypatch):
    sample_model("llama")
    (tmp_path / "key").write_text(KEY)
    monkeypatch.setenv("BIREME_KEY", secrets.token_hex(32))
    old, new = (Generation(tmp_path, REVISION, number=number) for number in (1, 2))
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
