"""OpenAI's video and image requests."""

import json

import pytest

from bireme.errors import RequestError
from bireme.openai.http.form import json_of
from bireme.pipelines.json_body import decode_body
from bireme.pipelines.video_request import REFUSED, ImageBody, check_images, parse_video, tensors_of


def video(**fields):
    return parse_video(json.dumps({"prompt": "x", **fields}))


def test_seconds_come_as_text_or_number():
    assert video(seconds="4").ask.seconds == video(seconds=4).ask.seconds == 4.0


def test_nvext_gives_what_the_top_level_leaves_open():
    ask = video(fps=8, nvext={"fps": 24, "num_frames": 9, "seed": 0}).ask
    assert (ask.fps, ask.num_frames, ask.seed) == (8, 9, 0)


def test_what_is_not_said_is_not_sent_and_zero_is():
    tensors = tensors_of(video(seed=0, guidance_scale=0).ask)
    assert set(tensors) == {"prompt", "seed", "guidance_scale"}
    assert tensors["seed"].dtype == "uint64" and tensors["guidance_scale"].dtype == "float32"


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"prompt": " "}, "prompt: empty"),
        ({"sekonds": 4}, "did you mean seconds"),
        ({"seconds": "four"}, "seconds: 'four'"),
        ({"input_reference": "x"}, "from text alone"),
        ({"nvext": {"annotations": []}}, "annotations are not given"),
        ({"fps": 2**31}, "fps"),
        ({"seed": -1}, "seed"),
        ({"output_format": "frames"}, "one of mp4, gif"),
        ({"response_format": "xml"}, "response_format"),
    ],
)
def test_what_can_not_be_served_is_refused_by_name(fields, words):
    with pytest.raises(RequestError, match=words):
        video(**fields)


def test_an_image_request_becomes_pictures():
    body = decode_body(b'{"prompt": "x", "n": 3, "output_format": "webp"}', ImageBody, REFUSED)
    ask = check_images(body).ask
    assert (ask.num_images, ask.output_format) == (3, "webp")


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": 11}, {"output_format": "mp4"}, {"nvext": {"fps": 8}}])
def test_an_image_request_out_of_bounds_is_refused(fields):
    with pytest.raises(RequestError):
        check_images(decode_body(json.dumps({"prompt": "x", **fields}), ImageBody, REFUSED))


def form(*fields):
    parts = b"".join(b"--b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % field for field in fields)
    return json_of(parts + b"--b--\r\n", b"multipart/form-data; boundary=b")


def test_a_form_is_the_same_as_json_and_its_numbers_are_numbers():
    assert json.loads(form((b'name="prompt"', b"x"), (b'name="fps"', b"8"))) == {"prompt": "x", "fps": 8}
    assert json_of(b"{}", b"application/json") == b"{}"


@pytest.mark.parametrize(
    "fields, words",
    [
        ([(b'name="fps"', b"many")], "fps: 'many'"),
        ([(b'name="prompt"', b"x"), (b'name="prompt"', b"y")], "sent twice"),
        ([(b'name="prompt"', b"\xff")], "not UTF-8"),
    ],
)
def test_a_form_that_is_wrong_is_refused(fields, words):
    with pytest.raises(RequestError, match=words):
        form(*fields)


def test_a_file_in_a_form_is_refused_by_its_name():
    data = form((b'name="prompt"', b"x"), (b'name="input_reference"; filename="a.png"', b"\x89PNG"))
    with pytest.raises(RequestError, match="from text alone"):
        parse_video(data)


def test_a_form_without_a_boundary_is_refused():
    with pytest.raises(RequestError, match="form"):
        json_of(b"x", b"multipart/form-data")
