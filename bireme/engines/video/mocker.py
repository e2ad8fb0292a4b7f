"""A video engine without a model: a square drifts over a color that the prompt decides. For load tests and demos.

Deterministic in prompt and seed; a step takes mocker.step_ms, loading mocker.load_ms.
"""

from __future__ import annotations

import hashlib
import time

import numpy as np

from bireme.engines.video.base import Frames, OnStep, VideoContext
from bireme.video.wire import DiffusionRequest, PipelineFacts

_FACTS = PipelineFacts(
    pipeline="MockPipeline", is_video=True, is_tested=True, frame_step=4, width_step=16, height_step=16, width=64,
    height=64, num_frames=17, fps=8, num_steps=10, guidance_scale=3.0, device="cpu", dtype="uint8",
)  # fmt: skip


class MockVideoEngine:
    """A VideoEngine."""

    def __init__(self, context: VideoContext) -> None:
        self._config = context.config.mocker

    def start(self) -> PipelineFacts:
        time.sleep(self._config.load_ms / 1000)
        return _FACTS

    def generate(self, work: DiffusionRequest, on_step: OnStep) -> Frames:
        for step in range(work.total_steps):
            time.sleep(self._config.step_ms / 1000)
            on_step(step + 1)
        count = work.num_images or work.made_frames
        return np.stack([self._frame(work, index) for index in range(count)])

    def stop(self) -> None:
        return None

    def _frame(self, work: DiffusionRequest, index: int) -> Frames:
        seed = work.seed + index if work.num_images else work.seed
        digest = hashlib.sha256(f"{work.prompt}\0{work.negative_prompt}\0{seed}".encode()).digest()
        frame: Frames = np.empty((work.height, work.width, 3), np.uint8)
        frame[:] = list(digest[:3])
        side, at = max(1, work.height // 4), 0 if work.num_images else index
        left = (digest[3] + at * max(1, work.width // 16)) % max(1, work.width - side)
        frame[side : 2 * side, left : left + side] = [255 - value for value in digest[:3]]
        return frame
