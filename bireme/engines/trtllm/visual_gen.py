"""TensorRT-LLM's VisualGen (from 1.3 on) as a video engine.

It reports no steps and can't be interrupted: a cancelled video, or picture, is made to its end. Pictures are made one
after the other, each by its own seed, as on the torch engine, so that each can be made again alone.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from bireme.engines.trtllm import lifecycle
from bireme.engines.trtllm.config import llm_arguments
from bireme.engines.trtllm.launchers import drop_ranks
from bireme.engines.video.base import Frames, OnStep, VideoContext
from bireme.engines.video.diffusion import pipeline_name
from bireme.errors import BiremeError, ConfigError, RequestError
from bireme.video.wire import DiffusionRequest, PipelineFacts

_FRAME_STEPS = {"LTXPipeline": 8, "LTX2Pipeline": 8}  # frames to a latent; others: 4
_SIZE_STEPS = {"LTXPipeline": 32, "LTX2Pipeline": 32}  # others: 16
_PICTURES = ("Flux", "QwenImage", "GlmImage")  # beginnings of classes that make no videos


class VisualGenEngine:
    """A VideoEngine."""

    def __init__(self, context: VideoContext) -> None:
        self._context = context
        self._generator: Any = None
        self._params: Any = None  # the class

    def start(self) -> PipelineFacts:
        name = pipeline_name(self._context.model_path)
        drop_ranks(os.environ)
        package, module = _import()
        arguments = llm_arguments(
            self._context.config, self._context.model_path, "video_diffusion", package.__version__
        )
        try:
            args = package.VisualGenArgs(**arguments)
            self._generator = package.VisualGen(arguments["model"], args)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"TensorRT-LLM {package.__version__}: VisualGen refuses its arguments: {error}"
            ) from error
        self._monitor = lifecycle.LlmMonitor(self._generator, lifecycle.leave)
        self._monitor.start()
        self._params = module.VisualGenParams
        self._refusal = getattr(module, "VisualGenParamsError", ValueError)
        return facts_of(name, self._generator.default_params)

    def generate(self, work: DiffusionRequest, on_step: OnStep) -> Frames:
        if not work.num_images:
            video: Frames = self._run(work, work.seed, "video")[0]
            on_step(work.total_steps)
            return video
        pictures: list[Frames] = []
        for i in range(work.num_images):
            pictures.append(self._run(work, work.seed + i, "image")[:1])
            on_step(work.num_steps * (i + 1))
        return np.concatenate(pictures)

    def stop(self) -> None:
        if self._generator is not None:
            self._monitor.stop()
            self._generator.shutdown()
            self._generator = None

    def _run(self, work: DiffusionRequest, seed: int, kind: str) -> Frames:
        """Return (1, T, H, W, 3) or (1, H, W, 3). Raises RequestError for what the pipeline doesn't take."""
        try:
            output = self._generator.generate(work.prompt, self._params(**params_of(work, seed)))
        except (self._refusal, ValueError) as error:
            raise RequestError(f"TensorRT-LLM's VisualGen refuses this request: {error}") from error
        except RuntimeError as error:  # also VisualGenError: this work has failed, the next one may not
            raise BiremeError(f"TensorRT-LLM's VisualGen: {error}") from error
        if failure := getattr(output, "error", None):
            raise BiremeError(f"TensorRT-LLM's VisualGen: {failure}")
        made = getattr(output, kind)
        if made is None:
            raise BiremeError(f"TensorRT-LLM's VisualGen made no {kind}; see its log")
        frames: Frames = np.asarray(made.cpu(), np.uint8)
        return frames


def params_of(work: DiffusionRequest, seed: int) -> dict[str, Any]:
    """Unset values are the pipeline's own."""
    fields: dict[str, Any] = {
        "height": work.height,
        "width": work.width,
        "num_inference_steps": work.num_steps,
        "guidance_scale": work.guidance_scale,
        "max_sequence_length": work.max_sequence_length,
        "seed": seed,
        "negative_prompt": work.negative_prompt or None,
    }
    if not work.num_images:
        fields |= {"num_frames": work.made_frames, "frame_rate": float(work.fps)}
    return {name: value for name, value in fields.items() if value is not None}


def facts_of(name: str, defaults: Any) -> PipelineFacts:
    """`defaults`: the loaded pipeline's VisualGenParams."""
    size_step = _SIZE_STEPS.get(name, 16)
    return PipelineFacts(
        pipeline=name,
        is_video=not name.startswith(_PICTURES),
        frame_step=_FRAME_STEPS.get(name, 4),
        width_step=size_step,
        height_step=size_step,
        width=int(defaults.width or 832),
        height=int(defaults.height or 480),
        num_frames=int(defaults.num_frames or 1),
        fps=round(defaults.frame_rate or 16),
        num_steps=int(defaults.num_inference_steps or 50),
        guidance_scale=defaults.guidance_scale,
        reports_steps=False,
        device="cuda",
    )


def _import() -> tuple[Any, Any]:
    """Raises ConfigError."""
    try:
        package = importlib.import_module("tensorrt_llm")
    except ImportError as error:
        raise ConfigError(
            f"engine: trtllm needs tensorrt_llm 1.3 or later for videos ({error}); use engine: torch, or name an"
            " environment that has it in BIREME_ENGINE_PYTHON"
        ) from error
    try:
        return package, importlib.import_module("tensorrt_llm.visual_gen")
    except ImportError as error:
        raise ConfigError(
            f"TensorRT-LLM {package.__version__} has no VisualGen, which came with 1.3; use engine: torch"
        ) from error
