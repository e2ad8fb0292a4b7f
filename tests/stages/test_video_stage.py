"""The stage of videos: how often it gives a sign of life."""

import asyncio
from types import SimpleNamespace

import pytest

from bireme.stages.engine_stage import EngineStage
from bireme.stages.video_diffusion import VideoDiffusion


@pytest.mark.parametrize(("stall_timeout_s", "expected"), [(4.0, 1.0), (60.0, 5.0)])
def test_signs_of_life_come_before_the_pipeline_calls_it_lost(monkeypatch, stall_timeout_s, expected):
    async def start(stage, context):
        pass

    monkeypatch.setattr(EngineStage, "start", start)
    recipe = SimpleNamespace(video=None, pipeline=SimpleNamespace(stall_timeout_s=stall_timeout_s))
    stage = VideoDiffusion(engine=object())
    asyncio.run(stage.start(SimpleNamespace(recipe=recipe, metrics=None)))
    assert stage._repeat_s == expected
