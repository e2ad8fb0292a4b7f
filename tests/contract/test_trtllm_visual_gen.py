"""TensorRT-LLM's VisualGen behind the video engine's interface."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from bireme.config import EngineConfig
from bireme.engines.registry import create_video_engine
from bireme.engines.trtllm.visual_gen import facts_of, params_of
from bireme.engines.video.base import AbortedError, VideoContext
from bireme.errors import BiremeError, ConfigError, RequestError
from bireme.video.wire import DiffusionRequest

pytestmark = pytest.mark.parametrize("profile", ["1.3"], indirect=True)
WORK = {
    "prompt": "a cat", "width": 64, "height": 32, "num_frames": 5, "made_frames": 5, "fps": 24, "num_steps": 3,
    "guidance_scale": 5.0, "seed": 7,
}  # fmt: skip
PICTURES = WORK | {"num_images": 2, "output_format": "png"}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    return str(tmp_path)


@pytest.fixture
def make(profile, model):
    """Return a maker of started engines."""
    made = []

    def make(**yaml):
        engine = create_video_engine("trtllm", VideoContext("video_diffusion", model, EngineConfig(llm_args=yaml)))
        engine.facts = engine.start()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop()


def made_by_tensorrt_llm():
    import tensorrt_llm

    return tensorrt_llm.VisualGen.made[-1]


def test_the_pipeline_s_own_values_are_what_a_request_gets(make):
    facts = make().facts
    assert (facts.width, facts.height, facts.num_frames, facts.num_steps) == (832, 480, 81, 50)
    assert facts.pipeline == "WanPipeline" and facts.is_video and not facts.reports_steps


def test_the_yaml_reaches_visual_gen(make, model):
    make(attention_config={"backend": "TRTLLM"})
    found = made_by_tensorrt_llm()
    assert found.model == found.args.model == model and found.args.attention_config == {"backend": "TRTLLM"}


def test_a_wrong_key_is_told_with_the_right_one_and_refused_by_visual_gen_itself(make, caplog):
    with pytest.raises(ConfigError, match="attention_confg"):
        make(attention_confg={})
    assert "attention_confg: {}; " in caplog.text and "did you mean attention_config" in caplog.text


def test_a_video_is_its_frames(make):
    frames = make().generate(DiffusionRequest(**WORK), lambda step: None)
    assert frames.shape == (5, 32, 64, 3) and frames.dtype == np.uint8
    assert list(frames[:, 0, 0, 1]) == [0, 1, 2, 3, 4] and frames[0, 0, 0, 0] == 7


def test_pictures_have_a_seed_each(make):
    frames = make().generate(DiffusionRequest(**PICTURES), lambda step: None)
    assert frames.shape == (2, 32, 64, 3) and list(frames[:, 0, 0, 0]) == [7, 8]


def test_each_picture_is_told_and_may_be_the_last(make):
    told, work = [], DiffusionRequest(**PICTURES)
    make().generate(work, told.append)
    assert told == [work.num_steps, 2 * work.num_steps]

    def gone(step):
        told.append(step)
        raise AbortedError

    with pytest.raises(AbortedError):
        make().generate(work, gone)
    assert told[2:] == [work.num_steps]


def test_what_the_pipeline_refuses_is_the_request_s_fault(make):
    with pytest.raises(RequestError, match="multiples of 16"):
        make().generate(DiffusionRequest(**WORK | {"width": 60}), lambda step: None)


def test_a_failed_generation_is_an_error_and_the_next_one_works(make):
    engine = make()
    with pytest.raises(BiremeError, match="out of memory") as caught:
        engine.generate(DiffusionRequest(**WORK | {"prompt": "too much"}), lambda step: None)
    assert not isinstance(caught.value, RequestError)  # it is not the request's fault
    assert len(engine.generate(DiffusionRequest(**WORK), lambda step: None)) == 5


def test_the_api_has_no_cancel(make):
    make()
    handle = made_by_tensorrt_llm().generate_async("a cat", made_by_tensorrt_llm().default_params)
    with pytest.raises(NotImplementedError, match="not yet implemented"):
        handle.cancel()


def test_what_nobody_wants_any_more_ends_after_its_work(make):
    def gone(step):
        raise AbortedError

    with pytest.raises(AbortedError):
        make().generate(DiffusionRequest(**WORK), gone)


def test_variables_of_launchers_are_dropped(make, monkeypatch):
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS"}
    for name in names:
        monkeypatch.setenv(name, "0")
    assert make().facts.is_video
    assert not names & os.environ.keys()


def test_stop_ends_visual_gen_and_may_be_repeated(make):
    engine = make()
    engine.stop()
    engine.stop()
    assert made_by_tensorrt_llm().is_shut_down


def test_only_what_the_work_says_is_passed_on(profile):
    names = set(params_of(DiffusionRequest(**PICTURES | {"guidance_scale": None}), 7))
    assert names == {"height", "width", "num_inference_steps", "seed"}


def test_a_pipeline_of_pictures_makes_no_videos(profile):
    from types import SimpleNamespace

    nothing = SimpleNamespace(
        width=None, height=None, num_frames=None, frame_rate=None, num_inference_steps=None, guidance_scale=None
    )
    assert not facts_of("FluxPipeline", nothing).is_video and facts_of("LTX2Pipeline", nothing).frame_step == 8
