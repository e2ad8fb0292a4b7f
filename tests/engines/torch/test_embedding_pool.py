"""Embeddings through memory that two processes map of each other, and through files where that has no room."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from bireme.config import CHECKOUT, CacheTransceiverConfig
from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord, host_id
from bireme.engines.torch.images.embedding_pool import EmbeddingPool
from bireme.engines.torch.images.tensor_rows import TensorRows, layout_of
from bireme.errors import ConfigError
from bireme.kv.transfer import MAPPED, create_transfer
from bireme.metrics import Registry
from bireme.multimodal.embedding_share import EmbeddingShare
from tests.engines.engine_fixtures import wait_for

HIDDEN, ROW_BYTES = 8, 32


def rows(num_tokens, seed=0):
    return TensorRows(torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)))


def pool_of(num_rows):
    return EmbeddingPool(num_rows * ROW_BYTES, torch.float32, HIDDEN, torch.device("cpu"))


@pytest.fixture
def join(tmp_path):
    """Return a maker of shares that find each other, with a pool or without."""
    made = []

    def make(worker, pool):
        config, metrics = CacheTransceiverConfig(), Registry(worker)
        transfer = create_transfer(MAPPED, run_dir=tmp_path, worker=worker, life=1, config=config, metrics=metrics)
        share = EmbeddingShare(transfer, worker, 1)
        share.start(layout_of("model", torch.float32, HIDDEN), pool)
        address = {"pid": os.getpid(), "host": host_id(), "transfer_endpoint": share.endpoint}
        run_folder.publish(tmp_path, WorkerRecord(worker=worker, life=1, **address))
        made.append(share)
        return share

    yield make
    for share in made:
        share.close()


def fetched(share, handle):
    results = []
    share.fetch(handle, results.append)
    wait_for(lambda: results)
    (found,) = results
    assert not isinstance(found, Exception), found
    return found.tensor if isinstance(found, TensorRows) else torch.frombuffer(found, dtype=torch.float32).view(-1, 8)


def test_rows_are_handed_out_and_taken_back():
    pool = pool_of(10)
    first, second = pool.take(6), pool.put(rows(4))
    assert pool.take(1) is None
    assert set(first.rows[0]).isdisjoint(second.rows[0])
    torch.testing.assert_close(pool.get(second).tensor, rows(4).tensor)
    pool.give_back(first)
    assert pool.num_free == 6
    assert pool.take(7) is None and pool.take(6) is not None


def test_rows_that_could_not_be_written_are_taken_back():
    pool = pool_of(10)
    with pytest.raises(RuntimeError):
        pool.put(TensorRows(torch.zeros(4, HIDDEN + 1)))  # as a device without memory would
    assert pool.num_free == 10


def test_embeddings_go_from_pool_to_pool_without_a_file(join, caplog):
    caplog.set_level("INFO")
    source, target = pool_of(64), pool_of(64)
    encoder, prefill = join("encoder", source), join("prefill", target)
    for seed in range(3):
        handle = encoder.offer("request", rows(20, seed), "00" * 32, None)
        assert source.num_free == 44
        assert torch.equal(fetched(prefill, handle), rows(20, seed).tensor)
        wait_for(lambda: source.num_free == target.num_free == 64)
    assert "event=mapped" in caplog.text and "event=staged" not in caplog.text


@pytest.mark.parametrize(("source", "target"), [(8, 64), (64, 8), (None, 64), (64, None), (None, None)])
def test_what_finds_no_pool_or_no_room_goes_through_files(join, source, target):
    pools = [pool_of(size) if size else None for size in (source, target)]
    encoder, prefill = join("encoder", pools[0]), join("prefill", pools[1])
    for seed in range(2):
        handle = encoder.offer("request", rows(20, seed), "00" * 32, None)
        assert torch.equal(fetched(prefill, handle), rows(20, seed).tensor)
    wait_for(lambda: all(pool is None or pool.num_free in (8, 64) for pool in pools))


def test_an_offer_that_nobody_fetches_gives_its_rows_back(join):
    pool = pool_of(64)
    encoder = join("encoder", pool)
    handles = [encoder.offer("request", rows(20), "00" * 32, None) for _ in range(3)]
    encoder.release(handles[0])
    wait_for(lambda: pool.num_free == 24)
    encoder.abort("request")
    wait_for(lambda: pool.num_free == 64)


def test_a_pool_that_holds_no_row_is_refused_with_its_key():
    with pytest.raises(ConfigError, match=r"multimodal_config.embedding_pool_bytes: 31; one row of embeddings has 32"):
        EmbeddingPool(31, torch.float32, HIDDEN, torch.device("cpu"))


def test_the_script_for_a_gpu_proves_both_ways_between_two_processes():
    command = [sys.executable, "tests/gpu/embedding_pool.py"]
    command += [] if torch.cuda.is_available() else "--device cpu --count 3 --tokens 300 --hidden 64".split()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=CHECKOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["pool"]["num_mapped"], found["files"]["num_mapped"]) == (1, 0)
    assert np.isfinite(found["pool"]["median_ms"])
