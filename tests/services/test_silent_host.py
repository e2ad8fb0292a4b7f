"""A host that goes silent while it is needed, with prefill or one of two decode workers, behind a cable that is cut."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from contextlib import ExitStack

import pytest

from tests.kv.transfer.needs import needs_nixl
from tests.services.served_hosts import LIMIT_S, NIXL, Server, wait_until
from tests.services.two_hosts import Cable, needs_namespaces

pytestmark = [needs_nixl, needs_namespaces]

CUT_S, PAUSE_S = 20.0, 0.5  # two requests a second
NOTICED_S = 5.0
NEAR, FAR = "decode", "prefill"  # the hosts' names


class Asked:
    """A streamed completion, asked for on the frontend's host, and when its first token came."""

    numbers = itertools.count()

    def __init__(self, cable):
        self.first_s, self.text = None, ""
        prompt = [next(self.numbers) % 400 + 20, *range(20, 420)]  # a prefix that nobody holds
        self._body = {"model": "mocker", "prompt": prompt, "max_tokens": 8, "stream": True, "temperature": 0}
        self.began = time.monotonic()
        self.thread = threading.Thread(target=lambda: cable.on_host(NEAR, self._read))
        self.thread.start()

    def _read(self):
        connection = http.client.HTTPConnection("127.0.0.1", 9000, timeout=LIMIT_S)
        connection.request("POST", "/v1/completions", json.dumps(self._body), {"content-type": "application/json"})
        for line in connection.getresponse():
            self.first_s = self.first_s or time.monotonic() - self.began
            self.text += line.decode()


def mocker_of(replicas):
    """Return the override of a host: so many workers of each stage."""
    config = NIXL["engine_config"] | {"mocker": {"step_ms": 10, "prefill_ms": 50}}
    workers = {
        stage: {"engine": "mocker", "replicas": count, "engine_config": config} for stage, count in replicas.items()
    }
    return {"workers": workers, "router": {"transfer_ms": 0}}


PREFILL_IS_FAR = {NEAR: {"prefill": 0, "decode": 1}, FAR: {"prefill": 1, "decode": 0}}
ONE_OF_TWO_DECODES_IS_FAR = {NEAR: {"decode": 1}, FAR: {"decode": 1}}


@pytest.fixture(params=[PREFILL_IS_FAR, ONE_OF_TWO_DECODES_IS_FAR], ids=["prefill", "decode"])
def hosts(request, tmp_path):
    """Return the cable and the two servers."""
    with ExitStack() as stack:
        cable = Cable()
        stack.callback(cable.remove)
        servers = {}
        for host, replicas in request.param.items():
            servers[host] = Server(cable, host, tmp_path, "mocker", mocker_of(replicas))
            stack.callback(servers[host].end)
        for server in servers.values():
            server.wait_ready()
        yield cable, servers


def ask_while(cable, seconds):
    asked, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        asked.append(Asked(cable))
        time.sleep(PAUSE_S)
    return asked


def wait_for_far_work(cable, servers):
    """Return once the far worker has answered another request."""
    before = servers[FAR].metric("bireme_requests_total")
    wait_until(
        lambda: bool(ask_while(cable, PAUSE_S)) and servers[FAR].metric("bireme_requests_total") > before,
        servers[NEAR].log.read_text,
    )


def test_no_first_token_waits_long_for_a_host_that_is_silent(hosts):
    cable, servers = hosts
    wait_for_far_work(cable, servers)
    cable.plug(False)
    cut_at = time.monotonic()
    asked = ask_while(cable, CUT_S)
    cable.plug(True)
    asked += ask_while(cable, NOTICED_S)
    for one in asked:
        one.thread.join(LIMIT_S)
    assert [one.text for one in asked if "[DONE]" not in one.text or '"error"' in one.text] == []
    # 5 s and 3 s on a machine that does nothing else, and until the cable is plugged in again where nobody notices
    assert max(one.first_s for one in asked) < 0.6 * CUT_S
    assert max(one.first_s for one in asked if one.began > cut_at + NOTICED_S) < 0.4 * CUT_S
    wait_for_far_work(cable, servers)
