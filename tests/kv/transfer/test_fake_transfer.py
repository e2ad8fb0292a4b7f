"""The fake must refuse and release as the real one does, or engines would be tested against a dream."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from bireme.disagg import DisaggregatedParams
from bireme.errors import KvTransferError, NotFoundError, RequestCancelledError, RequestError, UnavailableError
from bireme.kv.transfer.base import GroupLayout, KvLayout
from bireme.kv.transfer.fake import FakeNetwork
from bireme.kv.transfer.memory import HostMemory

LAYOUT = KvLayout("tiny", "float32", (GroupLayout(0, (4,)),))


class Story:
    """A prefill and a decode side; rows hold their token's number."""

    def __init__(self):
        self.network = FakeNetwork()
        self.prefill = self.network.join("prefill")
        self.decode = self.network.join("decode", chunk_bytes=16)
        self.prefill.start(LAYOUT)
        self.decode.start(LAYOUT)
        self.released: list[int] = []
        self.target = np.full((10, 4), 255, np.uint8)

    def export(self, num_tokens=10):
        lease = self.prefill.reserve(lambda: self.released.append(1))
        rows = np.repeat(np.arange(num_tokens, dtype=np.uint8)[:, None], 4, axis=1)
        lease.export(num_tokens, HostMemory([[rows]]).token_rows())
        ids = {"lease_id": lease.lease_id, "generation": lease.generation}
        return DisaggregatedParams(worker="prefill", life=1, num_tokens=num_tokens, **ids)

    @property
    def written(self):
        return {token: int(row[0]) for token, row in enumerate(self.target) if row[0] != 255}

    def fetch(self, params, first=0):
        ended, errors, rows = threading.Event(), [], HostMemory([[self.target]]).token_rows()
        fetch = self.decode.fetch(params, (first,), rows, lambda error: (errors.append(error), ended.set()))

        def result():
            assert ended.wait(5)
            return errors[0]

        return fetch, result

    def close(self):
        self.prefill.close()
        self.decode.close()


@pytest.fixture
def story():
    story = Story()
    yield story
    story.close()


def test_rows_arrive_and_the_lease_is_released(story):
    assert story.fetch(story.export(), first=4)[1]() is None
    assert story.written == {token: token for token in range(4, 10)}
    story.prefill.close()
    assert story.released == [1]


def test_a_replay_is_not_found(story):
    params = story.export()
    assert story.fetch(params)[1]() is None
    assert isinstance(story.fetch(params)[1](), NotFoundError)


def test_an_expired_lease_is_not_found(story):
    params = story.export()
    assert story.prefill.expire_leases() == 1
    assert isinstance(story.fetch(params)[1](), NotFoundError)


def test_another_life_is_not_found_and_a_closed_exporter_unavailable(story):
    params = story.export()
    assert isinstance(story.fetch(msgspec.structs.replace(params, life=2))[1](), NotFoundError)
    story.prefill.close()
    assert isinstance(story.fetch(params)[1](), UnavailableError)


def test_a_held_fetch_can_be_cancelled(story):
    story.decode.hold()
    fetch, result = story.fetch(story.export())
    fetch.cancel()
    assert isinstance(result(), RequestCancelledError)


def test_a_held_fetch_goes_on_after_resume(story):
    story.decode.hold()
    _, result = story.fetch(story.export())
    story.decode.resume()
    assert result() is None


def test_a_failure_can_be_ordered(story):
    story.decode.fail_with = UnavailableError("lost")
    error = story.fetch(story.export())[1]()
    assert isinstance(error, KvTransferError) and str(error) == "lost"


def test_layouts_are_compared(story):
    story.decode.layout = msgspec.structs.replace(LAYOUT, dtype="bfloat16")
    error = story.fetch(story.export())[1]()
    assert isinstance(error, RequestError) and "dtype" in str(error)
