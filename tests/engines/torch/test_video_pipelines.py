"""Pipelines of diffusers as a video engine: Wan (trained), LTX and Flux (random weights)."""

import json

import numpy as np
import pytest

from bireme.config import EngineConfig, VideoConfig
from bireme.engines.video.base import AbortedError, VideoContext
from bireme.engines.video.diffusion import DiffusionEngine, pipeline_name, to_frames
from bireme.errors import BiremeError, ConfigError
from bireme.video.rules import RequestedVideo, resolve
from tests.engines.torch import tiny_pipelines

TRAINED = tiny_pipelines.CHECKOUT / "models" / "tiny-video"


def started(folder):
    engine = DiffusionEngine(VideoContext("video_diffusion", str(folder), EngineConfig(), 1))
    return engine, engine.start()


@pytest.fixture(scope="module")
def wan():
    return started(TRAINED)


def run(engine, facts, **fields):
    steps = []
    config = VideoConfig(size="64x64", num_inference_steps=2, max_sequence_length=32)
    work = resolve(RequestedVideo(prompt="a red circle", seed=fields.pop("seed", 1), **fields), facts, config)
    return engine.generate(work, steps.append), steps


def test_wan_makes_the_frames_of_its_rule_and_reports_steps(wan):
    frames, steps = run(*wan, num_frames=8)
    assert frames.shape == (9, 64, 64, 3) and frames.dtype == np.uint8 and steps == [1, 2]
    facts = wan[1]
    assert (facts.pipeline, facts.is_tested, facts.frame_step, facts.width_step) == ("WanPipeline", True, 4, 16)


def test_a_seed_makes_the_same_frames_again_and_another_others(wan):
    first, again, other = (run(*wan, num_frames=5, seed=seed)[0] for seed in (7, 7, 8))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_what_is_not_wanted_any_more_ends_after_its_step_and_the_next_work_is_right(wan):
    engine, facts = wan
    before, _ = run(engine, facts, num_frames=5)
    work = resolve(RequestedVideo(prompt="x", num_inference_steps=50), facts, VideoConfig(size="64x64"))
    seen = []

    def stop(step):
        seen.append(step)
        if step == 2:
            raise AbortedError

    with pytest.raises(AbortedError):
        engine.generate(work, stop)
    assert seen == [1, 2]
    assert np.array_equal(run(engine, facts, num_frames=5)[0], before)


def test_a_video_pipeline_makes_pictures_each_by_its_own_seed(wan):
    pictures, steps = run(*wan, num_images=2, seed=3)
    alone, _ = run(*wan, num_images=1, seed=4)
    assert pictures.shape == (2, 64, 64, 3) and steps == [1, 2, 3, 4]
    assert np.array_equal(pictures[1], alone[0])


def test_ltx_makes_8n_plus_1_frames(tmp_path):
    engine, facts = started(tiny_pipelines.make_ltx(tmp_path))
    assert facts.pipeline == "LTXPipeline" and facts.is_tested and facts.width_step % 32 == 0
    frames, steps = run(engine, facts, num_frames=8, fps=8)
    assert len(frames) == facts.frame_step * -(-7 // facts.frame_step) + 1 and steps == [1, 2]


def test_flux_makes_pictures_and_no_videos(tmp_path):
    engine, facts = started(tiny_pipelines.make_flux(tmp_path))
    assert facts.pipeline == "FluxPipeline" and facts.is_tested and not facts.is_video
    pictures, steps = run(engine, facts, num_images=1)
    assert pictures.shape == (1, 64, 64, 3) and steps == [1, 2]


@pytest.mark.parametrize("index", ["", "{", "[]", "{}", json.dumps({"_class_name": ["pipeline.py", "Mine"]})])
def test_a_folder_that_is_no_pipeline_is_a_config_error(tmp_path, index):
    if index:
        (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(ConfigError):
        pipeline_name(str(tmp_path))


def test_an_unknown_class_is_a_config_error(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "NoSuchPipeline"}))
    with pytest.raises(ConfigError, match="can't load"):
        started(tmp_path)


def test_nan_is_an_error_with_its_remedy():
    with pytest.raises(BiremeError, match="dtype: float32"):
        to_frames(np.full((1, 4, 4, 3), np.nan))
