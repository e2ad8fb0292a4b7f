"""From a request to the work of a pipeline: defaults, limits and rounding.

Number of frames: `num_frames`, else `seconds` x `fps` (the missing one has its default), else the default number. A
pipeline that makes n * k + 1 frames makes the next such number, and the clip is cut to the requested length. Precedence
of every value: request, recipe, pipeline. All errors are RequestError: field, value, limit, remedy.
"""

from __future__ import annotations

import math
import re
import secrets
from typing import Any

import msgspec

from bireme.config import VideoConfig
from bireme.errors import RequestError
from bireme.video.wire import IMAGE_FORMATS, VIDEO_FORMATS, DiffusionRequest, PipelineFacts

MAX_SEED = 2**63 - 1 - 16  # torch's seeds are signed, and further pictures count on
_SIZE = re.compile(r"(\d{1,6})[xX](\d{1,6})")


class RequestedVideo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's fields; None: not given. The names are those of video_diffusion's tensors."""

    prompt: str = ""
    negative_prompt: str | None = None
    size: str | None = None
    seconds: float | None = None
    fps: int | None = None
    num_frames: int | None = None
    num_images: int | None = None  # pictures instead of a video
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None
    output_format: str | None = None


def resolve(ask: RequestedVideo, facts: PipelineFacts, config: VideoConfig) -> DiffusionRequest:
    """Return the work. Raises RequestError."""
    is_image = ask.num_images is not None
    if not is_image and not facts.is_video:
        raise RequestError(f"num_images: missing; {facts.pipeline} makes pictures, not videos: send num_images")
    width, height = _size(ask, facts, config)
    frames: dict[str, Any] = _pictures(ask, config) if is_image else _frames(ask, facts, config)
    work = DiffusionRequest(
        prompt=_prompt(ask, config),
        negative_prompt=_first(ask.negative_prompt, config.negative_prompt),
        width=width,
        height=height,
        num_steps=_within(
            "num_inference_steps", _first(ask.num_inference_steps, config.num_inference_steps, facts.num_steps),
            1, config.max_steps, "video.max_steps",
        ),
        guidance_scale=_guidance(ask, facts, config),
        max_sequence_length=config.max_sequence_length,
        seed=_seed(ask),
        output_format=_format(ask, is_image),
        **frames,
    )  # fmt: skip
    _check_raw(work, config)
    return work


def frames_for(num_frames: int, frame_step: int) -> int:
    """Return the least n * frame_step + 1 that is not below num_frames."""
    return math.ceil((num_frames - 1) / frame_step) * frame_step + 1


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _prompt(ask: RequestedVideo, config: VideoConfig) -> str:
    if not ask.prompt.strip():
        raise RequestError("prompt: missing; say what is to be seen")
    for name, text in (("prompt", ask.prompt), ("negative_prompt", ask.negative_prompt or "")):
        if len(text) > config.max_prompt_chars:
            limit = config.max_prompt_chars
            raise RequestError(f"{name}: {len(text)} characters; video.max_prompt_chars is {limit}, shorten it")
    return ask.prompt


def _size(ask: RequestedVideo, facts: PipelineFacts, config: VideoConfig) -> tuple[int, int]:
    text = ask.size if ask.size not in (None, "auto") else config.size or None
    if text is None:
        return facts.width, facts.height
    match = _SIZE.fullmatch(text)
    if match is None:
        raise RequestError(f"size: {text[:40]!r}; send WIDTHxHEIGHT in pixels, such as {facts.width}x{facts.height}")
    width, height = int(match[1]), int(match[2])
    if max(width - config.max_width, height - config.max_height, width * height - config.max_pixels) > 0:
        limits = f"{config.max_width}x{config.max_height} and {config.max_pixels} pixels"
        raise RequestError(f"size: {width}x{height}; video.max_width, max_height and max_pixels allow {limits}")
    if width % facts.width_step or height % facts.height_step or not width * height:
        near = f"{_near(width, facts.width_step)}x{_near(height, facts.height_step)}"
        steps = f"{facts.width_step} in width and {facts.height_step} in height"
        raise RequestError(f"size: {width}x{height}; {facts.pipeline} takes multiples of {steps}, such as {near}")
    return width, height


def _near(value: int, step: int) -> int:
    return max(1, round(value / step)) * step


def _frames(ask: RequestedVideo, facts: PipelineFacts, config: VideoConfig) -> dict[str, int]:
    fps = _within("fps", _first(ask.fps, config.fps, facts.fps), 1, config.max_fps, "video.max_fps")
    count, name = _count(ask, facts, config, fps)
    _within(name, count, 1, config.max_frames, "video.max_frames", "frames")
    return {"fps": fps, "num_frames": count, "made_frames": frames_for(count, facts.frame_step)}


def _count(ask: RequestedVideo, facts: PipelineFacts, config: VideoConfig, fps: int) -> tuple[int, str]:
    """Return the number of frames and the field that it comes from."""
    if ask.num_frames is not None:
        if ask.seconds is not None:
            raise RequestError("num_frames: with seconds; send one of the two")
        return ask.num_frames, "num_frames"
    if ask.seconds is None and ask.fps is None:
        return _first(config.num_frames, facts.num_frames), "num_frames"
    seconds = _first(ask.seconds, config.seconds)
    if not (math.isfinite(seconds) and 0 < seconds <= 3600):
        raise RequestError(f"seconds: {seconds}; send a number above 0, up to 3600")
    return max(1, round(seconds * fps)), "seconds"


def _pictures(ask: RequestedVideo, config: VideoConfig) -> dict[str, int]:
    for name in ("seconds", "fps", "num_frames"):
        if getattr(ask, name) is not None:
            raise RequestError(f"{name}: with num_images; pictures have no length, remove one of the two")
    return {"num_images": _within("num_images", ask.num_images, 1, config.max_images, "video.max_images")}


def _guidance(ask: RequestedVideo, facts: PipelineFacts, config: VideoConfig) -> float | None:
    if facts.guidance_scale is None:
        if ask.guidance_scale is not None:
            raise RequestError(f"guidance_scale: {facts.pipeline} has no such setting; remove it")
        return None
    value = float(_first(ask.guidance_scale, config.guidance_scale, facts.guidance_scale))
    if not 0 <= value <= 100:
        raise RequestError(f"guidance_scale: {value:g}; 0 to 100")
    return value


def _seed(ask: RequestedVideo) -> int:
    if ask.seed is None:
        return secrets.randbits(32)
    if not 0 <= ask.seed <= MAX_SEED:
        raise RequestError(f"seed: {ask.seed}; 0 to {MAX_SEED}")
    return ask.seed


def _format(ask: RequestedVideo, is_image: bool) -> Any:
    known = IMAGE_FORMATS if is_image else VIDEO_FORMATS
    value = ask.output_format or known[0]
    if value not in known:
        raise RequestError(f"output_format: {value[:40]!r}; one of {', '.join(known)}")
    return value


def _check_raw(work: DiffusionRequest, config: VideoConfig) -> None:
    """Raw frames have a size that is known before they are made."""
    num_bytes = work.num_frames * work.width * work.height * 3
    if work.output_format == "frames" and num_bytes > config.max_inline_bytes:
        limit = config.max_inline_bytes
        raise RequestError(
            f"output_format: frames of {num_bytes} bytes; video.max_inline_bytes is {limit}, ask for mp4"
        )


def _within(name: str, value: Any, low: int, high: int, key: str, unit: str = "") -> int:
    if not low <= value <= high:
        said = f"{value} {unit}".strip()
        raise RequestError(f"{name}: {said}; {low} to {high} ({key})")
    return int(value)
