"""Pipelines of diffusers as a video engine: the class is read from model_index.json, its arguments from the pipeline.

Tested: Wan and LTX (video), Flux (pictures). Others that diffusers loads are accepted and logged as untested. Code of a
checkpoint is never run, and weights are read from safetensors alone.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bireme.engines.video.base import Frames, OnStep, VideoContext
from bireme.errors import BiremeError, ConfigError, ResourceExhaustedError
from bireme.video.wire import DiffusionRequest, PipelineFacts

logger = logging.getLogger("bireme.engine")
TESTED = ("WanPipeline", "LTXPipeline", "FluxPipeline")
INSTALL = "pip install -e .[video]"
_SIZE_STEPS = {"WanPipeline": 16, "LTXPipeline": 32}  # required by the classes, whatever their autoencoder
_FPS = {"LTXPipeline": 24, "CogVideoXPipeline": 8, "HunyuanVideoPipeline": 24, "MochiPipeline": 30}  # others: 16
_DTYPES = ("float32", "float16", "bfloat16")


class DiffusionEngine:
    """A VideoEngine."""

    def __init__(self, context: VideoContext) -> None:
        self._context = context
        self._pipeline: Any = None
        self._accepts: frozenset[str] = frozenset()

    def start(self) -> PipelineFacts:
        name = pipeline_name(self._context.model_path)
        try:
            import diffusers
            import torch
        except ImportError as error:
            raise ConfigError(f"engine torch needs {error.name} for video_diffusion; {INSTALL}") from error
        diffusers.utils.logging.set_verbosity_error()
        torch.set_num_threads(self._context.num_threads)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._dtype = _dtype(self._context.config.dtype, self._device)
        self._pipeline = _load(self._context.model_path, getattr(torch, self._dtype)).to(self._device)
        self._pipeline.set_progress_bar_config(disable=True)
        self._accepts = frozenset(inspect.signature(self._pipeline.__call__).parameters)
        facts = self._facts(name)
        if not facts.is_tested:
            logger.warning("pipeline_untested pipeline=%s tested=%s", name, ",".join(TESTED))
        self._warm_up(facts)
        return facts

    def generate(self, work: DiffusionRequest, on_step: OnStep) -> Frames:
        """Pictures one after the other, each by its own seed, so that each can be made again alone."""
        import torch

        try:
            if not work.num_images:
                return self._run(work, work.seed, on_step)
            pictures = []
            for index in range(work.num_images):
                done = index * work.num_steps
                pictures.append(self._run(work, work.seed + index, partial(_count_on, on_step, done))[:1])
            return np.concatenate(pictures)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise ResourceExhaustedError(
                f"the GPU's memory does not hold {work.made_frames} frames of {work.width}x{work.height};"
                " ask for fewer or smaller ones"
            ) from error
        except RuntimeError:
            from bireme.engines.child.lost_device import leave_if_lost

            leave_if_lost(self._context.worker)
            raise
        finally:
            self._pipeline.maybe_free_model_hooks()

    def stop(self) -> None:
        self._pipeline = None

    def _run(self, work: DiffusionRequest, seed: int, on_step: OnStep) -> Frames:
        import torch

        generator = torch.Generator("cpu").manual_seed(seed)  # the same noise on every device
        arguments = self._arguments(work) | {"generator": generator, "output_type": "np"}
        if "callback_on_step_end" in self._accepts:

            def after_step(pipeline: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                on_step(index + 1)
                return tensors

            arguments["callback_on_step_end"] = after_step
        result = self._pipeline(**arguments)
        return to_frames(result.frames[0] if hasattr(result, "frames") else result.images)

    def _arguments(self, work: DiffusionRequest) -> dict[str, Any]:
        offered = {
            "prompt": work.prompt,
            "negative_prompt": work.negative_prompt,
            "height": work.height,
            "width": work.width,
            "num_frames": work.made_frames,
            "frame_rate": work.fps,
            "num_inference_steps": work.num_steps,
            "guidance_scale": work.guidance_scale,
            "max_sequence_length": work.max_sequence_length,
        }
        return {name: value for name, value in offered.items() if name in self._accepts and value not in (None, "")}

    def _facts(self, name: str) -> PipelineFacts:
        pipeline = self._pipeline
        is_video = "num_frames" in self._accepts
        step = size_step(pipeline, name)
        defaults = {
            parameter.name: parameter.default
            for parameter in inspect.signature(pipeline.__call__).parameters.values()
            if isinstance(parameter.default, (int, float))
        }
        own = int(getattr(pipeline, "default_sample_size", 64) * getattr(pipeline, "vae_scale_factor", 8))
        return PipelineFacts(
            pipeline=name,
            is_video=is_video,
            is_tested=name in TESTED,
            frame_step=frame_step(pipeline) if is_video else 1,
            width_step=step,
            height_step=step,
            width=_fit(int(defaults.get("width", own)), step),
            height=_fit(int(defaults.get("height", own)), step),
            num_frames=int(defaults.get("num_frames", 1)),
            fps=_FPS.get(name, 16),
            num_steps=int(defaults.get("num_inference_steps", 50)),
            guidance_scale=float(defaults["guidance_scale"]) if "guidance_scale" in defaults else None,
            reports_steps="callback_on_step_end" in self._accepts,
            device=self._device,
            dtype=self._dtype,
        )

    def _warm_up(self, facts: PipelineFacts) -> None:
        """A faulty model fails now, and kernels are compiled."""
        side = max(facts.width_step, 64 // facts.width_step * facts.width_step)
        frames = facts.frame_step + 1 if facts.is_video else 1
        work = DiffusionRequest(
            prompt="warm-up", width=side, height=side, num_frames=frames, made_frames=frames, fps=facts.fps,
            num_images=0 if facts.is_video else 1, num_steps=2, guidance_scale=facts.guidance_scale, seed=0,
        )  # fmt: skip
        try:
            self.generate(work, lambda step: None)
        except BiremeError:
            raise
        except Exception as error:
            raise ConfigError(f"{facts.pipeline}: its warm-up failed: {type(error).__name__}: {error}") from error


def _count_on(on_step: OnStep, done: int, step: int) -> None:
    on_step(done + step)


def pipeline_name(model_path: str) -> str:
    """Of a hub id, too. Raises ConfigError."""
    try:
        text = _index_file(model_path).read_text(encoding="utf-8")
        name = json.loads(text)["_class_name"]
    except FileNotFoundError:
        raise ConfigError(f"{model_path}: no model_index.json; a folder in diffusers' layout is expected") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{model_path}: model_index.json can't be read ({type(error).__name__})") from error
    if not isinstance(name, str):
        raise ConfigError(f"{model_path}: its pipeline is code of its own ({name!r}), which is never run; convert it")
    return name


def _index_file(model_path: str) -> Path:
    if Path(model_path).is_dir():
        return Path(model_path) / "model_index.json"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(model_path, "model_index.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"{model_path}: neither a folder nor a model that the hub has ({error})"[:500]) from error


def _load(model_path: str, dtype: Any) -> Any:
    from diffusers import DiffusionPipeline

    try:
        return DiffusionPipeline.from_pretrained(
            model_path, dtype=dtype, use_safetensors=True, local_files_only=Path(model_path).is_dir()
        )
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise ConfigError(f"{model_path}: diffusers can't load it: {str(error)[:500]}") from error


def _dtype(wanted: str, device: str) -> str:
    if wanted == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    if wanted not in _DTYPES:
        raise ConfigError(f"workers.video_diffusion: dtype {wanted}; auto, {', '.join(_DTYPES)}")
    return wanted


def frame_step(pipeline: Any) -> int:
    for name in ("vae_scale_factor_temporal", "vae_temporal_compression_ratio"):
        if value := getattr(pipeline, name, None):
            return int(value)
    return 4


def size_step(pipeline: Any, name: str) -> int:
    """Pixels of a latent times latents of a patch."""
    names = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
    pixels = next((int(value) for found in names if (value := getattr(pipeline, found, None))), 8)
    patch = getattr(getattr(pipeline, "transformer", None), "config", {}).get("patch_size", 1)
    if isinstance(patch, (list, tuple)):
        patch = patch[-1]
    if name.startswith("Flux"):
        patch = 2  # packed by the pipeline
    return math.lcm(pixels * int(patch or 1), _SIZE_STEPS.get(name, 1))


def to_frames(values: Any) -> Frames:
    """As uint8, (T, H, W, 3). Raises BiremeError for NaN."""
    frames = np.asarray(values, np.float32)
    if not np.isfinite(frames).all():
        raise BiremeError("the pipeline made NaN or infinity; set dtype: float32 or bfloat16 in the engine's YAML")
    if frames.ndim == 3:
        frames = frames[None]
    return (frames * 255).round().clip(0, 255).astype(np.uint8)


def _fit(value: int, step: int) -> int:
    return max(step, value // step * step)
