"""The interface of every video engine, inside the engine process.

1. `start` loads and warms up; returns what the pipeline takes. Raises ConfigError with the remedy.
2. `generate` does one piece of work, on the thread that called `start`; one at a time. It calls `on_step` after each
  denoising step; when that raises, it stops there, frees what the work held and lets the exception through. An engine
  that can't report steps says so in its facts; cancelled work then runs to its end.
3. `stop` frees everything; also after a failed start.

engines/registry.py makes it: `bireme.engines.<name>.create_video(context)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bireme.config import EngineConfig
from bireme.video.wire import DiffusionRequest, PipelineFacts

Frames = npt.NDArray[np.uint8]  # (T, H, W, 3): frames of a video, or pictures
OnStep = Callable[[int], None]  # denoising steps done, of Generation.total_steps


class AbortedError(Exception):
    """Raised by `on_step` when the work was cancelled."""


@dataclass(frozen=True, slots=True)
class VideoContext:
    worker: str
    model_path: str  # folder, or hub id
    config: EngineConfig
    num_threads: int = 1


class VideoEngine(Protocol):
    def start(self) -> PipelineFacts: ...

    def generate(self, work: DiffusionRequest, on_step: OnStep) -> Frames:
        """Return made_frames frames, or num_images pictures. Raises RequestError, BiremeError."""

    def stop(self) -> None: ...
