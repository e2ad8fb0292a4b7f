import asyncio
import base64
import io
import ipaddress

import numpy as np
import pytest
from PIL import Image

from bireme.config import MediaLimits
from bireme.errors import RequestError
from bireme.multimodal.fetch import HttpFetcher
from bireme.multimodal.media import MediaLoader

HERE = ipaddress.ip_address("127.0.0.1")


@pytest.fixture
async def load():
    """Return a function: sources, limits -> pictures, fetched from 127.0.0.1 alone."""
    made = []

    async def run(*sources, **limits):
        made.append(
            MediaLoader(
                MediaLimits(**{"timeout_s": 5.0, **limits}),
                lambda settings: HttpFetcher(settings, is_allowed=lambda address: address == HERE),
            )
        )
        return await made[-1].load(sources)

    yield run
    for loader in made:
        await loader.close()


async def refusal(load, *sources, **limits):
    with pytest.raises(RequestError) as refused:
        await load(*sources, **limits)
    return str(refused.value)


def data_url(content, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


async def test_pictures_of_every_source_come_in_order(load, png, media_server, tmp_path):
    media_server.reply("/a.png", png(color="red"))
    (tmp_path / "b.png").write_bytes(png(color="blue"))
    sources = [
        media_server.url("/a.png"),
        data_url(png(color="lime")).encode(),
        f"file://{tmp_path}/b.png",
        png(color="white"),
    ]
    pictures = await load(*sources, allowed_local_media_path=str(tmp_path))
    assert [picture.pixels[0, 0].tolist() for picture in pictures] == [
        [255, 0, 0],
        [0, 255, 0],
        [0, 0, 255],
        [255, 255, 255],
    ]


async def test_equal_pictures_have_equal_hashes_wherever_they_come_from(load, png, media_server):
    media_server.reply("/a.png", png())
    first, second, other = await load(media_server.url("/a.png"), png(), png(color="blue"))
    assert first.content_hash == second.content_hash != other.content_hash


async def test_a_picture_has_rgb_pixels(load, png):
    (picture,) = await load(png("LA", (5, 2), (0, 0)))
    assert picture.pixels.shape == (2, 5, 3) and (picture.pixels == 255).all()
    assert picture.num_bytes == 30 and picture.pixels.dtype == np.uint8


async def test_an_error_says_which_picture(load, png):
    assert (await refusal(load, png(), b"nonsense")).startswith("images[1]: ")


@pytest.mark.parametrize(
    "source",
    [
        b"",
        "",
        "/etc/passwd",
        "../a.png",
        "a.png",
        "ftp://127.0.0.1/a.png",
        "gopher://127.0.0.1/",
        "unix:/run/socket",
        "javascript:alert(1)",
        "blob:https://example.com/1",
        "file:///etc/passwd",
        b"\x80\x04\x95pickle",
        b"\xff\xfe",
        "data:text/html;base64,PGI+",
        "data:application/octet-stream;base64,gASV",
        "data:image/png,plain",
        "data:image/png;base64",
        "data:image/png;base64,***",
        "data:image/png;base64,QUJ",
        "data:image/png;base64,QUJD\nQUJD",
        "data:" + "image/png;" * 100 + "base64,QUJD",
    ],
)
async def test_a_source_that_is_not_understood_is_refused_without_repeating_it(load, source):
    text = await refusal(load, source)
    for secret in ("passwd", "socket", "pickle", "127.0.0.1", "0x", "QUJ", "alert"):
        assert secret not in text


async def test_a_data_url_over_the_limit_is_refused_before_it_is_decoded(load, png, monkeypatch):
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    assert "at most 1000 (media.max_image_bytes)" in await refusal(load, data_url(b"x" * 1004), max_image_bytes=1000)


async def test_a_data_url_of_exactly_the_limit_is_read(load, png):
    content = png()
    assert await load(data_url(content), max_image_bytes=len(content))
    assert "media.max_image_bytes" in await refusal(load, data_url(content), max_image_bytes=len(content) - 1)


async def test_raw_bytes_over_the_limit_are_refused(load, png):
    assert "media.max_image_bytes" in await refusal(load, png(), max_image_bytes=20)


async def test_too_many_pictures_are_refused_before_any_is_fetched(load, media_server):
    assert "200 images; at most 16" in await refusal(load, *[media_server.url("/a.png")] * 200)
    assert media_server.requests == []


async def test_the_pictures_of_a_request_have_a_limit_together(load, png, media_server):
    content = png()
    media_server.reply("/a.png", content)
    sources = [content, data_url(content), media_server.url("/a.png")]
    assert len(await load(*sources, max_request_bytes=3 * len(content))) == 3
    assert "media.max_request_bytes" in await refusal(load, *sources, max_request_bytes=3 * len(content) - 1)


async def test_the_pixels_of_a_request_have_a_limit_together(load, png):
    content = png()
    width, height = Image.open(io.BytesIO(content)).size
    most = 3 * width * height
    assert len(await load(*[content] * 3, max_request_pixels=most)) == 3
    refused = await refusal(load, *[content] * 3, max_request_pixels=most - 1)
    assert f"{most} pixels so far; at most {most - 1} in all (media.max_request_pixels)" in refused


async def test_the_first_failure_ends_the_other_fetches(load, media_server):
    ended = asyncio.Event()

    async def hang(_, writer):
        await writer.wait_closed()
        ended.set()

    media_server.answers["/slow.png"] = hang
    media_server.reply("/missing.png", status="404 Not Found")
    text = await refusal(load, media_server.url("/slow.png"), media_server.url("/missing.png"), timeout_s=60.0)
    assert text.startswith("images[1]: its server answers 404")


async def test_a_cancelled_load_ends_its_fetches(load, media_server):
    began = asyncio.Event()

    async def hang(_, writer):
        began.set()
        await asyncio.sleep(60)

    media_server.answers["/slow.png"] = hang
    task = asyncio.ensure_future(load(media_server.url("/slow.png"), timeout_s=60.0))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)


async def test_a_fetched_page_is_not_a_picture(load, media_server):
    media_server.reply("/a.png", b"<html>secret</html>", Content_Type="image/png")
    text = await refusal(load, media_server.url("/a.png"))
    assert "send PNG" in text and "secret" not in text


async def test_no_error_of_a_fetched_picture_holds_its_url(load, media_server):
    media_server.reply("/token-1234.png", b"\x89PNG\r\n\x1a\n")
    assert "1234" not in await refusal(load, media_server.url("/token-1234.png"))
