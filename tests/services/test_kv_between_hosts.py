"""KV by NIXL between two hosts: network namespaces that a cable joins, with process ids of their own. Needs root."""

import time

import pytest

from tests.kv.transfer.kv_side import Child
from tests.kv.transfer.needs import needs_nixl
from tests.services.two_hosts import Cable, needs_namespaces

pytestmark = [needs_nixl, needs_namespaces]
LONG = 1000  # tokens: 125 chunks


@pytest.fixture
def cable():
    cable = Cable()
    yield cable
    cable.remove()


@pytest.fixture
def hosts(cable, tmp_path):
    made = {}
    for worker, address in cable.addresses.items():
        options = {"backend": "nixl", "host": address, "timeout_ms": 60_000}
        made[worker] = Child(tmp_path, worker, cable.command(worker), **options)
    yield made["prefill"], made["decode"]
    for child in made.values():
        child.reap()


def fetch(prefill, decode, **delays):
    decode.fetch(prefill.export(LONG, delays.get("read_delay_s", 0.0)), delays.get("write_delay_s", 0.0))


def test_rows_go_to_another_host(hosts):
    prefill, decode = hosts
    for _ in range(3):
        fetch(prefill, decode)
        assert decode.call("result") == [None, True]
    assert prefill.call("is_free") and decode.call("is_free")


def test_a_cut_cable_ends_the_transfer_on_both_sides_and_a_new_one_begins_once_it_is_whole(hosts, cable):
    prefill, decode = hosts
    fetch(prefill, decode, read_delay_s=0.01)
    assert prefill.call("wait_reading")
    cable.plug(False)
    assert decode.call("result") == ["KvTransferError", True]
    assert prefill.call("is_free") and decode.call("is_free")
    params = prefill.export(LONG)
    cable.plug(True)
    decode.fetch(params)
    assert decode.call("result") == [None, True]


def test_a_cable_that_is_out_for_a_moment_costs_nothing(hosts, cable):
    prefill, decode = hosts
    fetch(prefill, decode, read_delay_s=0.01)
    assert prefill.call("wait_reading")
    cable.plug(False)
    time.sleep(0.3)
    cable.plug(True)
    assert decode.call("result") == [None, True]


def test_writes_that_were_given_up_keep_their_room_until_none_can_arrive(hosts, cable):
    prefill, decode = hosts
    fetch(prefill, decode, read_delay_s=0.01)
    assert prefill.call("wait_reading")
    cable.plug(False)
    assert prefill.call("abort")
    cable.plug(True)
    assert decode.call("result") == ["NotFoundError", True]
    assert decode.call("is_free") and prefill.call("is_free")
    fetch(prefill, decode)
    assert decode.call("result") == [None, True]


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_host_that_is_gone_leaves_nothing_held_on_the_other(hosts, victim):
    prefill, decode = hosts
    fetch(prefill, decode, read_delay_s=0.01)
    assert prefill.call("wait_reading")
    (prefill if victim == "prefill" else decode).kill()
    if victim == "prefill":
        assert decode.call("result") == ["KvTransferError", True]
    assert (decode if victim == "prefill" else prefill).call("is_free")
