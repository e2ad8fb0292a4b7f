"""KV from an engine of another launch on this host, and from one that shared memory can't reach."""

import errno
import threading
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import msgspec
import pytest
import zmq

from bireme.discovery.records import host_id
from bireme.errors import KvTransferError, NotFoundError
from bireme.kv.transfer import importer, wire
from bireme.kv.transfer.process import SILENCE_S, FarProcess
from bireme.kv.wire.curve import curve_keys
from tests.kv.transfer.kv_side import DEPLOYMENT_KEY, Side, all_files_of, wait_until
from tests.kv.transfer.needs import needs_nixl


def has_ipv6():
    table = Path("/proc/net/if_inet6")
    return table.exists() and bool(table.read_text())


ELSEWHERE = "prefill@b:8001"


@pytest.fixture
def far(tmp_path):
    """A prefill engine of another launch, with a run directory of its own."""
    folder = tmp_path / "other"
    folder.mkdir()
    side = Side(folder, "prefill")
    yield side
    side.close()
    assert not all_files_of(folder, "prefill")


@pytest.fixture
def decode_of(make_side):
    """Return a function: changes to the record of the far worker, as discovery has it -> a decode engine."""

    def make(far, **changes):
        record = msgspec.structs.replace(far.record(), server="b:8001", **changes)

        def find(worker):
            if worker != ELSEWHERE:
                raise NotFoundError(worker)
            return record

        return make_side("decode", find=find)

    return make


def exported(far):
    return msgspec.structs.replace(far.export(100), worker=ELSEWHERE)


def test_rows_come_from_another_launch_of_this_host(far, decode_of):
    fetching = decode_of(far, host=host_id()).fetch(exported(far))
    assert fetching.result() is None and fetching.is_right
    wait_until(lambda: far.num_released == 1 and not far.lease_counts())


def test_a_worker_of_another_host_is_named_with_the_remedy(far, decode_of):
    params = exported(far)
    error = decode_of(far, host="elsewhere").fetch(params).result()
    assert isinstance(error, KvTransferError)
    assert f"{ELSEWHERE} is on another host" in str(error) and "NIXL" in str(error)


def test_a_life_that_discovery_does_not_know_yet_is_prefill_s_fault(far, decode_of):
    decode = decode_of(far, life=far.life - 1)
    assert isinstance(decode.fetch(exported(far)).result(), KvTransferError)


def test_a_life_that_is_over_has_no_lease(far, decode_of):
    assert isinstance(decode_of(far, life=far.life + 1).fetch(exported(far)).result(), NotFoundError)


def test_a_worker_that_discovery_has_lost_is_prefill_s_fault(far, decode_of):
    params = msgspec.structs.replace(exported(far), worker="prefill@c:1")
    assert isinstance(decode_of(far).fetch(params).result(), KvTransferError)


def asks(endpoint, key=None):
    """Return a socket that has pinged an exporter; `key`: of the deployment."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.ipv6 = "[" in endpoint
    if key:
        socket.curve_publickey, socket.curve_secretkey = curve_keys(key, "reader")
        socket.curve_serverkey = curve_keys(key, "engine")[0]
    socket.connect(endpoint)
    socket.send(wire.encode(wire.PeerPing()))
    return socket


def test_only_the_deployment_s_processes_reach_a_control_socket_that_other_hosts_can(make_side):
    endpoint = make_side("prefill", host="localhost").transfer.endpoint  # a name: it may be of any network
    sockets = [asks(endpoint), asks(endpoint, b"another key" * 3), asks(endpoint, DEPLOYMENT_KEY)]
    assert isinstance(wire.decode_to_importer(sockets[2].recv()), wire.PeerPong)
    assert [socket.poll(100) for socket in sockets[:2]] == [0, 0]
    for socket in sockets:
        socket.close()


def test_a_control_socket_of_this_host_alone_has_no_other_address(make_side):
    side = make_side("prefill", host="127.0.0.1")
    assert side.transfer._router.last_endpoint.startswith(b"tcp://127.0.0.1:")


def test_an_exporter_that_cannot_be_reached_for_want_of_sockets_is_prefill_s_fault(far, decode_of, monkeypatch):
    decode = decode_of(far, host=host_id())
    monkeypatch.setattr(decode.transfer._importer, "connect", Mock(side_effect=zmq.ZMQError(errno.EMFILE)))
    error = decode.fetch(exported(far)).result()
    assert isinstance(error, KvTransferError) and "Too many open files" in str(error)


def test_an_exporter_of_another_host_that_nobody_needs_is_forgotten(far, decode_of, monkeypatch):
    """Its next life has another endpoint: the sockets of all that have been would stay."""
    decode = decode_of(far, host=host_id())
    monkeypatch.setattr(importer, "Process", FarProcess)
    importing = decode.transfer._importer
    assert decode.fetch(exported(far)).result() is None and not importing.is_idle
    monkeypatch.setattr(importer, "_IDLE_S", 0.1)
    wait_until(lambda: importing.is_idle and not decode.transfer._dealers)
    assert decode.fetch(exported(far)).result() is None


def test_silence_of_an_exporter_that_nobody_asked_is_no_sign_of_its_death(far, decode_of, monkeypatch):
    """It answers when the importer has looked who is alive."""
    decode, has_looked = decode_of(far, host=host_id()), threading.Event()
    monkeypatch.setattr(importer, "Process", FarProcess)
    importing, exporting = decode.transfer._importer, far.transfer._exporter
    assert decode.fetch(exported(far)).result() is None
    (peer,) = importing._peers.values()
    peer.process._seen_at -= 2 * SILENCE_S
    looks = Mock(wraps=importing.tick, side_effect=lambda: importing._fetches and has_looked.set() or DEFAULT)
    answers = Mock(wraps=exporting.on_message, side_effect=lambda *_: has_looked.wait(60) and DEFAULT)
    monkeypatch.setattr(importing, "tick", looks)
    monkeypatch.setattr(exporting, "on_message", answers)
    fetching = decode.fetch(exported(far))
    assert fetching.result() is None and fetching.is_right and answers.called


@needs_nixl
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_rows_come_over_ipv6(tmp_path):
    sides = [Side(tmp_path, "prefill", backend="nixl", host="[::1]")]
    assert sides[0].transfer.endpoint.startswith("tcp://[::1]:")
    sides.append(Side(tmp_path, "decode", backend="nixl", host="[::1]", find=lambda worker: sides[0].record()))
    fetching = sides[1].fetch(sides[0].export(100))
    assert fetching.result() is None and fetching.is_right
    for side in sides:
        side.close()


def test_a_control_socket_takes_both_kinds_of_addresses(make_side):
    side = make_side("prefill", host="[2001:db8::5]")  # of any network; it is this host's by its record alone
    port = side.transfer.endpoint.rpartition(":")[2]
    for address in ("127.0.0.1", "[::1]") if has_ipv6() else ("127.0.0.1",):
        socket = asks(f"tcp://{address}:{port}", DEPLOYMENT_KEY)
        assert socket.poll(10_000)
        socket.close()
