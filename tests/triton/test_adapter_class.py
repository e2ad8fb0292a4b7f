"""The adapter's own decisions that no client sees: readiness, and what as_triton_model returns."""

from __future__ import annotations

import pytest

from bireme.specs import CHAT
from bireme.stages.absent import AbsentStage
from bireme.triton import as_triton_model
from bireme.triton.event_loop import EventLoop


class Moody(AbsentStage):
    spec = CHAT
    mood = True

    def __init__(self):
        super().__init__("not in this test")

    def is_ready(self) -> bool:
        return self.mood


@pytest.fixture
def adapter(triton_module):
    adapter = as_triton_model(Moody)()
    adapter._loop, adapter._stage = EventLoop("test"), Moody()
    yield adapter
    adapter._loop.stop(5)


def test_the_model_is_ready_when_its_stage_is(adapter):
    assert adapter.is_ready()
    adapter._stage.mood = False
    assert not adapter.is_ready()


def test_the_model_is_not_ready_without_its_loop(adapter):
    adapter._loop.stop(5)
    assert not adapter.is_ready()


def test_finalize_before_initialize_is_harmless(triton_module):
    as_triton_model(Moody)().finalize()
