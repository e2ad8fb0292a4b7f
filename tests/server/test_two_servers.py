"""One model on two tritonservers that share a folder: spread, drain, a server that leaves, a frontend of its own."""

import json
import os
import signal
import threading
import urllib.request

import pytest

from tests.server.two_servers import LIMIT_S, MODEL, TwoServers
from tools import drain

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def servers(sample_model, tmp_path_factory):
    sample_model("llama")
    running = TwoServers(tmp_path_factory.mktemp("two"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


def test_the_model_is_listed_once_and_requests_spread(servers):
    assert [model["id"] for model in servers.get("/v1/models")["data"]] == [MODEL]
    assert servers.served_by(6) == {servers.decode_of(servers.a), servers.decode_of(servers.b)}


def test_a_pipeline_of_one_server_uses_the_other_s_workers(servers):
    url = f"http://{servers.a.addresses['http']}/v2/models/completion/generate"
    used, texts = set(), set()
    for _ in range(6):
        body = json.dumps({"text_input": "the oars of the lower bank", "max_tokens": 4}).encode()
        with urllib.request.urlopen(url, body, timeout=LIMIT_S) as reply:
            answer = json.load(reply)
        texts.add(answer["text_output"])
        used.add(json.loads(answer["usage"])["decode_worker"])
    assert used == {"decode", servers.decode_of(servers.b)} and len(texts) == 1


def test_a_worker_that_is_drained_gets_nothing_new_until_it_is_put_back(servers):
    folder, name = str(servers.b.run_folder()), servers.decode_of(servers.b)
    assert drain.main(["decode", "--run-folder", folder]) == 0
    servers.until(lambda: servers.workers().get(name) == "draining")
    assert servers.served_by(4) == {servers.decode_of(servers.a)}
    assert drain.main(["decode", "--run-folder", folder, "--undo"]) == 0
    servers.until(lambda: servers.workers().get(name) == "ready")
    assert name in servers.served_by(4)


def test_a_server_that_is_told_to_end_takes_nothing_new_and_ends_what_it_has(servers):
    expected = servers.ask(100)
    answers = []
    asking = [threading.Thread(target=lambda: answers.append(servers.ask(100))) for _ in range(4)]
    for thread in asking:
        thread.start()
    os.kill(servers.b.pid, signal.SIGTERM)
    for thread in asking:
        thread.join()
    assert answers == [expected] * 4
    assert servers.b.wait(LIMIT_S) == 0 and servers.b.left_over() == []
    servers.until(
        lambda: set(servers.workers()) == {servers.decode_of(servers.a), f"prefill@{servers.a.addresses['grpc']}"}
    )
    assert servers.served_by(2) == {servers.decode_of(servers.a)}
