"""From what a request asks to what a pipeline does."""

import msgspec
import pytest

from bireme.config import VideoConfig
from bireme.errors import RequestError
from bireme.video.rules import RequestedVideo, frames_for, resolve
from bireme.video.wire import PipelineFacts, details_of

WAN = PipelineFacts(
    pipeline="WanPipeline", is_video=True, frame_step=4, width_step=16, height_step=16, width=832, height=480,
    num_frames=81, fps=24, num_steps=50, guidance_scale=5.0,
)  # fmt: skip
FLUX = msgspec.structs.replace(WAN, pipeline="FluxPipeline", is_video=False, guidance_scale=None)


def work(facts=WAN, config=None, **fields):
    return resolve(RequestedVideo(prompt="a cat", **fields), facts, config or VideoConfig())


@pytest.mark.parametrize(
    "fields, count",
    [
        ({"num_frames": 100}, 100),
        ({"seconds": 4.0, "fps": 24}, 96),
        ({"seconds": 5.0}, 120),
        ({"fps": 30}, 120),
        ({}, 81),
        ({"seconds": 0.01}, 1),
    ],
)
def test_frames_come_from_num_frames_then_seconds_and_fps_then_the_default(fields, count):
    assert work(**fields).num_frames == count


@pytest.mark.parametrize("asked, step, made", [(16, 4, 17), (17, 4, 17), (18, 4, 21), (1, 4, 1), (8, 8, 9), (9, 1, 9)])
def test_a_pipeline_makes_the_next_number_that_it_can(asked, step, made):
    assert frames_for(asked, step) == made


def test_frames_that_are_made_beyond_what_was_asked_are_told():
    assert details_of(work(num_frames=16, fps=8)).generated_frames == 17
    assert details_of(work(num_frames=17, fps=8)).generated_frames is None


def test_the_request_wins_over_the_recipe_and_the_recipe_over_the_pipeline():
    config = VideoConfig(num_inference_steps=7, size="64x64", fps=8)
    assert work(config=config).num_steps == 7 and work(config=config).width == 64
    assert work(config=config, num_inference_steps=3, size="32x48").num_steps == 3
    assert work(config=config, size="32x48").height == 48
    assert work().num_steps == 50 and work().width == 832


def test_zero_guidance_is_a_value():
    assert work(guidance_scale=0.0).guidance_scale == 0.0


def test_without_a_seed_one_is_drawn():
    assert work(seed=0).seed == 0
    assert len({work().seed for _ in range(8)}) > 1


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"size": "big"}, "size: 'big'; send WIDTHxHEIGHT"),
        ({"size": "0x64"}, "multiples of 16"),
        ({"size": "100x64"}, "such as 96x64"),
        ({"size": "2048x64"}, "video.max_width"),
        ({"size": "1920x1920"}, "pixels"),
        ({"num_frames": 0}, "num_frames: 0 frames; 1 to 257"),
        ({"num_frames": 258}, "video.max_frames"),
        ({"seconds": 100.0}, "seconds: 2400 frames"),
        ({"seconds": float("nan")}, "seconds: nan"),
        ({"seconds": 1.0, "num_frames": 9}, "num_frames: with seconds"),
        ({"fps": 0}, "fps: 0; 1 to 60"),
        ({"num_inference_steps": 101}, "video.max_steps"),
        ({"guidance_scale": float("nan")}, "guidance_scale: nan"),
        ({"seed": -1}, "seed: -1"),
        ({"output_format": "avi"}, "one of mp4, gif, frames"),
        ({"output_format": "frames", "size": "1280x720", "num_frames": 49}, "video.max_inline_bytes"),
        ({"num_images": 11}, "video.max_images"),
        ({"num_images": 1, "fps": 8}, "fps: with num_images"),
        ({"num_images": 1, "output_format": "mp4"}, "one of png, jpeg, webp"),
        ({"negative_prompt": "x" * 9000}, "video.max_prompt_chars is 8192"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_field_limit_and_remedy(fields, words):
    with pytest.raises(RequestError, match=words.replace("(", r"\(")):
        work(**fields)


def test_a_pipeline_of_pictures_makes_no_videos_and_has_no_guidance():
    with pytest.raises(RequestError, match="makes pictures, not videos"):
        work(FLUX)
    with pytest.raises(RequestError, match="has no such setting"):
        work(FLUX, num_images=1, guidance_scale=2.0)
    assert work(FLUX, num_images=2).total_steps == 100


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="prompt: missing"):
        resolve(RequestedVideo(prompt="  "), WAN, VideoConfig())
