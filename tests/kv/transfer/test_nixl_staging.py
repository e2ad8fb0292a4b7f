"""NIXL's way through host memory: when it is taken, and that what it takes is given back."""

from __future__ import annotations

import logging

import pytest

from bireme.errors import ConfigError
from bireme.kv.transfer import gpu_direct
from bireme.kv.transfer.nixl import NixlBackend
from bireme.kv.transfer.staging import NUM_SLOTS, SendRing
from tests.kv.transfer.kv_side import LAYOUT, memory_of
from tests.kv.transfer.needs import needs_nixl
from tests.kv.transfer.shared_pools import SharedPool, StagedPool


@needs_nixl
@pytest.mark.parametrize("backend", ["staged"])
def test_rows_of_a_gpu_go_through_page_locked_memory_on_both_sides(prefill, decode):
    for num_tokens in (1, 100, 1000):
        fetching = decode.fetch(prefill.export(num_tokens))
        assert fetching.result() is None and fetching.is_right
    assert prefill.pool.num_begun == decode.pool.num_begun > 50  # a chunk each
    assert (prefill.pool.num_locked, decode.pool.num_locked) == (2, 1)  # the ring, and the room of both
    for side in (prefill, decode):
        side.close()
        assert side.pool.num_locked == 0


@needs_nixl
@pytest.mark.parametrize("backend", ["staged"])
def test_the_next_chunk_is_copied_while_one_is_on_its_way(prefill, decode, monkeypatch):
    outlets, most = [], 0
    open_outlet = prefill.transfer._backend.open_outlet
    monkeypatch.setattr(
        prefill.transfer._backend, "open_outlet", lambda *args: outlets.append(open_outlet(*args)) or outlets[-1]
    )
    begin = prefill.pool._begin

    def watched(copy):
        nonlocal most
        most = max(most, NUM_SLOTS - len(prefill.transfer._backend.ring._free))
        return begin(copy)

    monkeypatch.setattr(prefill.pool, "_begin", watched)
    assert decode.fetch(prefill.export(200)).result() is None
    assert 2 <= most <= 3 and not outlets[0]._unread


@needs_nixl
def test_of_a_gpu_within_one_host_the_log_says_why(caplog):
    caplog.set_level(logging.INFO)
    backend = NixlBackend("prefill", between_hosts=False)
    backend.start(LAYOUT, StagedPool(LAYOUT), 1 << 20)
    backend.close()
    assert "transfer event=staged kind=VRAM" in caplog.text and "within one host UCX moves" in caplog.text


@needs_nixl
@pytest.mark.parametrize("choice", ["auto", "always"])
def test_host_memory_is_staged_if_that_is_asked_for(choice):
    backend, pool = NixlBackend("prefill", between_hosts=False, staging=choice), SharedPool(LAYOUT)
    backend.start(LAYOUT, memory_of(pool), 1 << 20)
    assert backend.can_read(pool) is (choice == "auto")
    backend.close()


@needs_nixl
def test_memory_that_ucx_can_not_read_is_refused_where_nothing_may_be_staged(monkeypatch):
    backend = NixlBackend("prefill", between_hosts=False, staging="never")

    def refuse(memory):
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(backend, "register", refuse)
    with pytest.raises(ConfigError, match="can't register KV memory: NIXL_ERR_BACKEND; .*staging: auto"):
        backend.start(LAYOUT, StagedPool(LAYOUT), 1 << 20)
    backend.close()


def test_a_ring_lends_each_slot_once():
    ring = SendRing(10_000)
    slots = [ring.take() for _ in range(NUM_SLOTS)]
    assert ring.take() is None and ring.used_bytes == ring.num_bytes == NUM_SLOTS * 12_288
    addresses = {slot.ctypes.data for slot in slots}
    while slots:
        ring.give(slots.pop())
    assert len(addresses) == NUM_SLOTS and ring.used_bytes == 0
    ring.close()


@pytest.fixture
def adapters(monkeypatch, tmp_path):
    """The folder of RDMA adapters."""
    monkeypatch.setattr(gpu_direct, "_ADAPTERS", tmp_path / "infiniband")
    monkeypatch.setattr(gpu_direct, "_PEER_MEMORY", (tmp_path / "nvidia_peermem",))
    monkeypatch.setattr(gpu_direct, "_has_dma_buf", lambda device: device == 1)
    monkeypatch.delenv("UCX_TLS", raising=False)
    return tmp_path / "infiniband"


def test_a_gpu_is_read_by_an_adapter_where_there_is_one_that_can(adapters, monkeypatch):
    assert "no RDMA adapter" in gpu_direct.why_not_direct(1)
    adapters.mkdir()
    assert "no RDMA adapter" in gpu_direct.why_not_direct(1)
    (adapters / "mlx5_0").mkdir()
    assert "nvidia_peermem" in gpu_direct.why_not_direct(0)
    assert gpu_direct.why_not_direct(1) == ""  # by DMA-BUF
    (adapters.parent / "nvidia_peermem").mkdir()
    assert gpu_direct.why_not_direct(0) == ""
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")
    assert "UCX_TLS" in gpu_direct.why_not_direct(0)


@pytest.mark.parametrize(
    ("transports", "allows"),
    [("", True), ("all", True), ("rc_x,cuda_copy", True), ("tcp", False), ("^tcp", True), ("^tcp,ib,sysv", False)],
)
def test_what_ucx_tls_leaves_of_rdma(transports, allows):
    assert gpu_direct._allows_rdma(transports) is allows
