import base64

import pytest

from bireme.config import MediaLimits
from bireme.errors import RequestError
from bireme.multimodal.budget import Budget
from bireme.multimodal.inline import decode_data_url

CONTENT = b"picture!"
TEXT = base64.b64encode(CONTENT).decode()


def decode(text, limit=100):
    return decode_data_url(text, Budget(MediaLimits(max_image_bytes=limit)).picture())


@pytest.mark.parametrize(
    "head", ["data:image/png;base64", "DATA:IMAGE/PNG;BASE64", "data:;base64", "data:image/png;name=a.png;base64"]
)
def test_base64_is_decoded(head):
    assert decode(f"{head},{TEXT}") == CONTENT


@pytest.mark.parametrize(
    "head", ["data:text/html;base64", "data:application/octet-stream;base64", "data:imagex/png;base64"]
)
def test_a_media_type_that_is_no_picture_s_is_refused(head):
    with pytest.raises(RequestError, match="media type is not image"):
        decode(f"{head},{TEXT}")


@pytest.mark.parametrize(
    "text",
    [
        "data:image/png,plain",
        "data:image/png;base64",
        "data:",
        "data:image/png;base64;x=1,QUJD",
        "data:image/png;charset=\xff;base64,QUJD",
    ],
)
def test_other_forms_are_refused(text):
    with pytest.raises(RequestError, match="of the form data:image/png;base64"):
        decode(text)


@pytest.mark.parametrize("text", ["***", "QUJ", "QUJD\nQUJD", "QUJD QUJD", "QU\xffD", "QUJ%44", "QUJ-QUJ_"])
def test_bad_base64_is_refused(text):
    with pytest.raises(RequestError, match="not valid base64"):
        decode(f"data:image/png;base64,{text}")


@pytest.mark.parametrize("size", range(1, 9))
def test_the_size_is_estimated_closely_and_never_too_high(size):
    url = "data:image/png;base64," + base64.b64encode(b"x" * size).decode()
    assert decode(url, limit=size) == b"x" * size
    with pytest.raises(RequestError, match="media.max_image_bytes"):
        decode(url + "AAAA", limit=size)
