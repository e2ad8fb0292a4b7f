"""The encoder service over an encoder that counts and waits, with real leases."""

import io
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from bireme.config import MediaLimits, MultimodalConfig
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    NotFoundError,
    RequestCancelledError,
    RequestError,
    ResourceExhaustedError,
    UnavailableError,
)
from bireme.kv.transfer.fake import FakeNetwork
from bireme.kv.transfer.memory import HostMemory, as_bytes
from bireme.messages import EncodeRequest, EncodeSource
from bireme.metrics import Registry
from bireme.multimodal.embedding_share import EmbeddingShare, embedding_layout
from bireme.multimodal.encoding import EncodedRows, EncoderService
from bireme.multimodal.wire import seal_handle
from bireme.own_work import NUM_BYTES, Culprit, OwnWork, Work, culprit_of

HIDDEN = 4
BAD = 66  # a picture of this color can't be encoded


@dataclass
class ArrayRows:
    array: np.ndarray  # (tokens, HIDDEN) float32

    @property
    def num_tokens(self):
        return len(self.array)

    @property
    def num_bytes(self):
        return self.array.nbytes

    @property
    def memory(self):
        return HostMemory([[as_bytes(self.array)]])


@dataclass
class Ready:
    color: int
    num_tokens: int = 2
    grid: None = None


class CountingEncoder:
    """Two tokens a picture, filled with its color. `hold` keeps batches waiting until `go_on`."""

    hidden_size = HIDDEN

    def __init__(self):
        self.batches: list[int] = []
        self.niceness: list[int] = []  # of the threads that prepared
        self.hold = threading.Event()
        self.hold.set()

    def name_of(self, content_hash):
        return content_hash.hex()

    def prepare(self, pixels):
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return Ready(int(pixels[0, 0, 0]))

    def encode(self, batch):
        assert self.hold.wait(10)
        self.batches.append(len(batch))
        if any(one.color == BAD for one in batch):
            raise RuntimeError("no such colour")
        return [ArrayRows(np.full((2, HIDDEN), one.color, np.float32)) for one in batch]

    def read_embeddings(self, content):
        return EncodedRows(content.hex(), ArrayRows(np.zeros((2, HIDDEN), np.float32)), None)

    def write_embeddings(self, rows):
        return b"".join(one.array.tobytes() for one in rows)


class Bench:
    def __init__(self, config=None, media=None, max_queue_size=8):
        self.memory = bytearray(NUM_BYTES)
        self.network, self.metrics, self.encoder = FakeNetwork(), Registry("encoder"), CountingEncoder()
        self.share = EmbeddingShare(self.network.join("encoder-mm"), "encoder-mm", 1)
        self.share.start(embedding_layout("model", "float32", 4 * HIDDEN))
        self.service = EncoderService(
            self.encoder,
            self.share,
            config or MultimodalConfig(),
            media or MediaLimits(),
            self.metrics,
            max_queue_size,
            max_copies=2,
            mark=partial(OwnWork(self.memory).mark, work=Work.PICTURES),
        )
        self.service.start()
        self.number = 0

    def begin(self, *pictures, timeout_ms=0, **fields):
        """Submit; returns (key, how to wait for the outcome)."""
        self.number += 1
        key, ended, box = (0, self.number), threading.Event(), []
        sources = (one if isinstance(one, EncodeSource) else EncodeSource("image", one) for one in pictures)
        job = EncodeRequest(sources=tuple(sources), timeout_ms=timeout_ms, **fields)

        def done(outcome):
            box.append(outcome)
            ended.set()

        self.service.submit(key, job, done)

        def outcome():
            assert ended.wait(10)
            assert len(box) == 1
            return box[0]

        return key, outcome

    def run(self, *pictures, **fields):
        outcome = self.begin(*pictures, **fields)[1]()
        if isinstance(outcome, BiremeError):
            raise outcome
        return outcome

    def counts(self):
        return {name: value for name, _, value in self.metrics.take_delta().counters}

    @property
    def num_leases(self):
        return len(self.network.members["encoder-mm"].leases)


@pytest.fixture
def bench():
    made = []

    def make(**settings):
        made.append(Bench(**settings))
        return made[-1]

    yield make
    for one in made:
        one.encoder.hold.set()
        one.service.stop()
        one.share.close()


def png(color=10, size=(3, 2)):
    file = io.BytesIO()
    Image.new("RGB", size, (color, 0, 0)).save(file, "PNG")
    return file.getvalue()


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_pictures_come_back_in_order_each_with_a_lease(bench):
    one = bench()
    outcome = one.run(png(1), png(2), png(1), copies=2)
    assert [picture.encoded.rows.array[0, 0] for picture in outcome.pictures] == [1, 2, 1]
    assert (one.num_leases, len({h.lease_id for p in outcome.pictures for h in p.handles})) == (6, 6)


def test_equal_pictures_at_once_are_encoded_once(bench):
    one = bench()
    one.encoder.hold.clear()
    waits = [one.begin(png(7))[1] for _ in range(5)]
    wait_for(lambda: one.service.num_pending == 5 and one.service.step_began_at)
    one.encoder.hold.set()
    assert len({wait().pictures[0].encoded.name for wait in waits}) == 1
    assert one.encoder.batches == [1]


def test_a_picture_that_comes_again_is_not_encoded_again(bench):
    one = bench()
    one.run(png(7))
    one.run(png(7, (3, 2)), png(8))
    counts = one.counts()
    assert counts["bireme_embedding_cache_hits_total"] == 1 and counts["bireme_embedding_cache_misses_total"] == 2
    assert sum(one.encoder.batches) == 2


def test_pictures_of_several_requests_share_a_batch_up_to_the_limit(bench):
    one = bench(config=MultimodalConfig(max_batch_images=3))
    one.encoder.hold.clear()
    first = one.begin(png(1))[1]
    wait_for(lambda: one.service.step_began_at)
    waits = [one.begin(png(color))[1] for color in range(2, 8)]
    wait_for(lambda: len(one.service._waiting) == 6)
    one.encoder.hold.set()
    assert all(wait().pictures for wait in (first, *waits))
    assert one.encoder.batches == [1, 3, 3]


def test_a_picture_that_can_not_be_encoded_fails_alone(bench):
    one = bench()
    one.encoder.hold.clear()
    first = one.begin(png(1))[1]
    wait_for(lambda: one.service.step_began_at)
    bad, good = one.begin(png(9), png(BAD))[1], one.begin(png(2))[1]
    wait_for(lambda: len(one.service._waiting) == 3)
    one.encoder.hold.set()
    assert first().pictures and good().pictures
    assert str(bad()) == "images[1]: it could not be encoded: RuntimeError"
    wait_for(lambda: one.num_leases == 2)


def test_a_failure_is_not_remembered(bench):
    one = bench()
    for _ in range(2):
        with pytest.raises(BiremeError, match="could not be encoded"):
            one.run(png(BAD))
    assert one.encoder.batches == [1, 1]


def test_an_aborted_job_ends_and_leaves_no_lease(bench):
    one = bench()
    one.encoder.hold.clear()
    key, outcome = one.begin(png(1))
    wait_for(lambda: one.service.step_began_at)
    one.service.abort(key)
    assert isinstance(outcome(), RequestCancelledError)
    one.encoder.hold.set()
    assert one.num_leases == 0 and one.run(png(1)).pictures


def test_an_abort_that_comes_together_with_its_request_leaves_nothing(bench):
    """While the loop is held up by another's end."""
    one, go_on, is_held = bench(), threading.Event(), threading.Event()
    job = EncodeRequest(sources=(EncodeSource("image", png(1)),))
    one.service.submit((1, 1), job, lambda outcome: is_held.set() or go_on.wait(10))
    assert is_held.wait(5)
    key, outcome = one.begin(png(2))
    one.service.abort(key)
    go_on.set()
    assert isinstance(outcome(), RequestCancelledError)
    assert one.service.num_pending == 0 and one.run(png(2)).pictures


def test_an_abort_does_not_take_the_picture_from_others_who_wait_for_it(bench):
    one = bench()
    one.encoder.hold.clear()
    key, outcome = one.begin(png(1))
    wait_for(lambda: one.service.step_began_at)
    other = one.begin(png(1))[1]
    one.service.abort(key)
    one.encoder.hold.set()
    assert isinstance(outcome(), RequestCancelledError) and other().pictures


def test_an_abort_after_the_end_frees_the_leases(bench):
    one = bench()
    key, outcome = one.begin(png(1), png(2))
    assert outcome().pictures and one.num_leases == 2
    one.service.abort(key)
    wait_for(lambda: one.num_leases == 0)


def test_handles_are_given_back(bench):
    one = bench()
    handles = one.run(png(1), copies=2).pictures[0].handles
    assert one.num_leases == 2
    one.service.release(["no handle", *(seal_handle(handle, b"any") for handle in handles)])
    wait_for(lambda: one.num_leases == 0)


def test_a_job_that_takes_too_long_ends_with_its_limit(bench):
    one = bench()
    one.encoder.hold.clear()
    with pytest.raises(DeadlineExceededError, match="timeout_ms: 50"):
        one.run(png(1), timeout_ms=50)


def test_a_full_queue_is_said(bench):
    one = bench(max_queue_size=1)
    one.encoder.hold.clear()
    one.begin(png(1))
    with pytest.raises(ResourceExhaustedError, match="max_queue_size is 1"):
        one.begin(png(2))


@pytest.mark.parametrize(
    ("pictures", "fields"), [((), {}), ((b"x",) * 17, {}), ((b"x",), {"copies": 0}), ((b"x",), {"copies": 3})]
)
def test_jobs_that_can_not_be_are_refused(bench, pictures, fields):
    with pytest.raises(RequestError):
        bench().begin(*pictures, **fields)


def test_what_waits_at_the_end_ends_with_unavailable(bench):
    one = bench()
    one.encoder.hold.clear()
    outcome = one.begin(png(1))[1]
    wait_for(lambda: one.service.step_began_at)
    one.service.stop()
    assert isinstance(outcome(), UnavailableError)


def test_the_embeddings_themselves_come_along_when_asked_for(bench):
    assert bench().run(png(3), inline=True).embeddings == np.full((2, HIDDEN), 3, np.float32).tobytes()


def test_a_file_under_the_allowed_folder_and_bytes_of_the_same_picture_are_one(bench, tmp_path):
    (tmp_path / "a.png").write_bytes(png(4))
    one = bench(media=MediaLimits(allowed_local_media_path=str(tmp_path)))
    outcome = one.run(f"file://{tmp_path}/a.png".encode(), png(4))
    assert len({picture.encoded.name for picture in outcome.pictures}) == 1 and sum(one.encoder.batches) == 1
    with pytest.raises(RequestError, match=r"images\[0\]: "):
        one.run(f"file://{tmp_path}/../b.png".encode())


def test_pictures_and_computed_embeddings_of_a_request_have_one_limit_together(bench):
    computed = EncodeSource("embeddings", b"8 bytes." + b"{" + bytes(99))
    size = len(png(1)) + 2 * len(computed.content)
    assert len(bench(media=MediaLimits(max_request_bytes=size)).run(png(1), computed, computed).pictures) == 3
    with pytest.raises(RequestError, match=r"images\[2\]: .*media.max_request_bytes"):
        bench(media=MediaLimits(max_request_bytes=size - 1)).run(png(1), computed, computed)


def fetch(share, handle):
    ended, box = threading.Event(), []
    share.fetch(handle, lambda result: (box.append(result), ended.set()))
    assert ended.wait(10)
    return box[0]


def test_rows_reach_another_process_once(bench):
    one = bench()
    other = EmbeddingShare(one.network.join("prefill-mm"), "prefill-mm", 1)
    other.start(embedding_layout("model", "float32", 4 * HIDDEN))
    handle = one.run(png(5)).pictures[0].handles[0]
    assert one.num_leases == 1
    assert np.frombuffer(fetch(other, handle), np.float32).tolist() == [5.0] * 2 * HIDDEN
    wait_for(lambda: one.num_leases == 0)
    assert "send it again" in str(fetch(other, handle))
    other.close()


def test_rows_are_handed_over_uncopied_where_they_were_made(bench):
    one = bench()
    picture = one.run(png(5)).pictures[0]
    assert one.num_leases == 1
    assert fetch(one.share, picture.handles[0]) is picture.encoded.rows
    wait_for(lambda: one.num_leases == 0)
    assert "send it again" in str(fetch(one.share, picture.handles[0]))


def test_another_model_s_embeddings_are_not_taken(bench):
    one = bench()
    other = EmbeddingShare(one.network.join("prefill-mm"), "prefill-mm", 1)
    other.start(embedding_layout("another model", "float32", 4 * HIDDEN))
    result = fetch(other, one.run(png(5)).pictures[0].handles[0])
    assert isinstance(result, BiremeError) and not isinstance(result, NotFoundError)
    other.close()


def test_each_failure_of_the_encoder_is_told_to_its_engine(bench):
    one = bench()
    told = one.service._on_failure = Mock()
    with pytest.raises(BiremeError, match="could not be encoded"):
        one.run(png(9), png(BAD))
    wait_for(lambda: told.call_count == 1)


def test_a_picture_that_never_comes_to_its_end_is_named(bench):
    test = bench()
    test.encoder.hold.clear()
    key, outcome = test.begin(png(1), png(2))
    wait_for(lambda: test.service.step_began_at)
    wait_for(lambda: culprit_of(bytes(test.memory), 0.0) == Culprit(*key, Work.PICTURES))
    test.encoder.hold.set()
    outcome()
    assert culprit_of(bytes(test.memory), 0.0) is None


def test_pictures_of_several_requests_in_one_batch_name_nobody(bench):
    test = bench()
    test.encoder.hold.clear()
    first = test.begin(png(1))
    wait_for(lambda: test.service.step_began_at)
    others = [test.begin(png(color)) for color in (2, 3)]
    wait_for(lambda: len(test.service._waiting) == 2)
    wait_for(lambda: culprit_of(bytes(test.memory), 0.0) == Culprit(*first[0], Work.PICTURES))
    seen, encode = [], test.encoder.encode
    test.encoder.encode = lambda batch: seen.append(culprit_of(bytes(test.memory), 0.0)) or encode(batch)
    test.encoder.hold.set()
    for _, outcome in [first, *others]:
        outcome()
    assert seen == [None] and test.encoder.batches == [1, 2]


def test_pictures_are_scaled_by_threads_that_stand_behind_others(bench):
    test = bench()
    test.run(png(1))
    assert test.encoder.niceness == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)]
