"""tools/update.py, under load: a generation takes another one's place, or is found not to be fit for it."""

import os
import shlex
import signal

import pytest

from tests.server.rolling_turns import KEY, PROMPTS, Clients, Generation, update, wait_for

pytestmark = pytest.mark.server
QUICK = ("--mirror", "1", "--min-compared", "20", "--pause", "1", "--max-ttft-ratio", "100")
REVISION, OTHER = 30000, 20000


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
