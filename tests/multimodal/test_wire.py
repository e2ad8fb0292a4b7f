import msgspec
import pytest

from bireme.errors import RequestError
from bireme.multimodal.wire import (
    EmbeddingHandle,
    MediaItem,
    encode_multimodal,
    identity_of,
    open_handle,
    open_multimodal,
    peek_handle,
    seal_handle,
)

KEY = b"k" * 32
HASH = "ab" * 32
HANDLE = EmbeddingHandle(worker="encoder-mm", life=2, lease_id=7, generation=3, num_tokens=4, hash=HASH, grid=(1, 4, 4))


def item(**changes):
    fields = {"hash": HASH, "num_tokens": 4, "position": 10, "grid": (1, 4, 4), "handle": seal_handle(HANDLE, KEY)}
    return MediaItem(**fields | changes)


def opened(*items):
    return open_multimodal(encode_multimodal(items), KEY)


def test_a_sealed_handle_opens_to_what_it_was():
    assert open_handle(seal_handle(HANDLE, KEY), KEY) == HANDLE


def test_a_handle_is_read_without_its_signature_only_to_be_released():
    assert peek_handle(seal_handle(HANDLE, b"another key")) == HANDLE


@pytest.mark.parametrize("text", ["", "x", "e30=.", seal_handle(HANDLE, b"another key"), seal_handle(HANDLE, KEY)[:-2]])
def test_a_handle_that_this_deployment_did_not_sign_is_refused(text):
    with pytest.raises(RequestError, match="encoder returned, unchanged"):
        open_handle(text, KEY)


@pytest.mark.parametrize("text", ["", "x", "e30=.AAAA", "é"])
def test_a_handle_to_be_released_must_be_one(text):
    with pytest.raises(RequestError, match="handle: "):
        peek_handle(text)


def test_items_come_in_the_order_of_positions():
    items = opened(item(position=30, handle=None), item(position=10))
    assert [(one.position, one.handle) for one in items] == [(10, HANDLE), (30, None)]


@pytest.mark.parametrize("changes", [{"num_tokens": 5}, {"hash": "cd" * 32}, {"grid": (1, 2, 8)}, {"grid": None}])
def test_a_handle_serves_the_picture_that_it_was_made_for(changes):
    with pytest.raises(RequestError, match=r"items\[0\].handle: it belongs to another picture"):
        opened(item(**changes))


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"{", "multimodal: "),
        (b'{"v":1,"items":[{"hash":"\xff"}]}', "multimodal: 'utf-8' codec can't decode"),
        (b'{"v":2,"items":[]}', "version 2"),
        (encode_multimodal((item(hash="short", handle=None),)), "64 hexadecimal digits"),
        (encode_multimodal((item(num_tokens=0, handle=None),)), "at least 1 token"),
        (encode_multimodal((item(position=-1, handle=None),)), "at 0 or later"),
        (b" " * (5 << 20), "the limit is"),
        (encode_multimodal((item(handle=None),) * 5000), "at most 4096"),
    ],
)
def test_a_malformed_request_says_what_is_wrong(blob, message):
    with pytest.raises(RequestError, match=message):
        open_multimodal(blob, KEY)


def test_the_identity_is_of_pictures_and_places_not_of_handles():
    assert identity_of(opened(item())) == identity_of(opened(item(handle=None)))
    assert identity_of(opened(item())) != identity_of(opened(item(position=11)))


def test_the_request_is_json_that_a_client_can_make():
    tree = msgspec.json.decode(encode_multimodal((item(grid=None, handle=None),)))
    assert tree == {"v": 1, "items": [{"hash": HASH, "num_tokens": 4, "position": 10}]}
