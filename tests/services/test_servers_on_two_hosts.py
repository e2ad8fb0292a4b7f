"""One model on two hosts, a tritonserver each: encoder and decode on one, prefill on the other, NIXL between them."""

import time

import pytest

from tests.kv.transfer.needs import needs_nixl
from tests.server.picture_questions import answers_of_transformers, held_out
from tests.services.served_hosts import Hosts, wait_until
from tests.services.two_hosts import Cable, needs_namespaces

pytestmark = [needs_nixl, needs_namespaces]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    cable = Cable()
    made = None
    try:
        made = Hosts(cable, tmp_path_factory.mktemp("hosts"))
        made.prefill.wait_ready()
        made.decode.wait_ready()
        wait_until(made.has_transferred)
        yield made
    finally:
        if made is not None:
            made.end()
        cable.remove()


@pytest.fixture
def whole(hosts):
    """What the streams say over a cable that nobody touches."""
    yield hosts.texts()
    hosts.cable.slow_down(0)
    hosts.cable.plug(True)
    wait_until(hosts.has_transferred)


def test_a_picture_s_embeddings_and_kv_cross_and_the_answer_is_that_of_transformers(hosts):
    questions = held_out(1, ("describe", "two", "count"))
    assert [hosts.answer(question) for question in questions] == answers_of_transformers(questions)
    wait_until(lambda: hosts.prefill.metric("bireme_kv_transfer_bytes_total", 'worker="prefill-mm"') > 0)


def test_streams_survive_a_cable_that_is_cut_while_their_kv_is_on_its_way(hosts, whole):
    before = hosts.failures()
    streams = hosts.begin_slowly()
    hosts.cable.plug(False)
    assert [stream.result() for stream in streams] == whole  # while it is still cut
    wait_until(lambda: hosts.failures() > before)
    hosts.cable.slow_down(0)
    hosts.cable.plug(True)
    began = time.monotonic()
    wait_until(hosts.has_transferred)
    whole_again = time.monotonic()
    assert hosts.has_transferred()
    later_s = time.monotonic() - whole_again
    print(f"KV came {whole_again - began:.2f} s after the cable was whole again, in a later request in {later_s:.2f} s")
    assert hosts.texts() == whole


def test_streams_survive_a_cable_that_is_out_for_a_moment(hosts, whole):
    streams = hosts.begin_slowly()
    hosts.cable.plug(False)
    time.sleep(0.5)
    hosts.cable.plug(True)
    assert [stream.result() for stream in streams] == whole


def test_requests_that_come_while_the_cable_is_cut_are_answered_by_decode_alone(hosts, whole):
    hosts.cable.plug(False)
    streams = hosts.ask(hosts.prompts)
    assert [stream.result() for stream in streams] == whole
    assert {stream.timing["prefill_worker"] for stream in streams} == {"decode"}


def test_nothing_is_held_when_the_cable_was_cut_again_and_again(hosts, whole):
    for _ in range(3):
        streams = hosts.begin_slowly()
        hosts.cable.plug(False)
        assert [stream.result() for stream in streams] == whole
        hosts.cable.plug(True)
    wait_until(lambda: not any(server.metric("bireme_kv_leases") for server in (hosts.prefill, hosts.decode)))
    wait_until(lambda: not hosts.prefill.metric("bireme_kv_transfer_buffer_bytes"))
