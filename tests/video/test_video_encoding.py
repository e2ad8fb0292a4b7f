"""Frames to files, read back with PyAV and Pillow."""

import io

import av
import numpy as np
import pytest
from PIL import Image

from bireme.video.encoding import encode_image, encode_video


def moving_bar(count=9, height=32, width=48):
    frames = np.zeros((count, height, width, 3), np.uint8)
    for index in range(count):
        frames[index, :, 4 * index : 4 * index + 8] = (250, 60, 10)
    return frames


def decoded(data):
    with av.open(io.BytesIO(data)) as container:
        video = container.streams.video[0]
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]), video


@pytest.mark.parametrize("fps", [1, 8, 24, 60])
def test_an_mp4_has_all_frames_at_the_rate_asked_for_and_looks_like_them(fps):
    frames = moving_bar()
    back, video = decoded(encode_video(frames, fps, "mp4"))
    assert back.shape == frames.shape and video.average_rate == fps and video.codec_context.name == "h264"
    assert np.abs(back.astype(int) - frames).mean() < 12


def test_an_mp4_begins_with_its_index():
    data = encode_video(moving_bar(), 8, "mp4")
    assert data.index(b"moov") < data.index(b"mdat")


def test_odd_sides_are_filled_up():
    back, _ = decoded(encode_video(moving_bar(3, 31, 47), 8, "mp4"))
    assert back.shape == (3, 32, 48, 3)


def test_a_gif_has_all_frames_and_lasts_as_long():
    picture = Image.open(io.BytesIO(encode_video(moving_bar(9), 7, "gif")))
    times_ms = []
    for index in range(picture.n_frames):
        picture.seek(index)
        times_ms.append(picture.info["duration"])
    assert picture.n_frames == 9 and abs(sum(times_ms) - 9000 / 7) <= 10


@pytest.mark.parametrize("kind, mode", [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_pictures_are_what_they_say(kind, mode):
    picture = Image.open(io.BytesIO(encode_image(moving_bar()[0], kind)))
    assert picture.format == mode and picture.size == (48, 32)
