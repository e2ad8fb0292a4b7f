"""OpenAI's video and image requests to a video worker's; unknown fields are refused by name.

Beyond OpenAI's fields: those of video_diffusion's tensors, on the top level or in `nvext`; the top level wins. The
worker checks what depends on the pipeline (sizes, steps, frames).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from bireme.errors import RequestError
from bireme.pipelines.json_body import decode_body
from bireme.types import Array
from bireme.video.rules import RequestedVideo
from bireme.video.wire import IMAGE_FORMATS

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
ResponseFormat = Literal["b64_json", "url", "file_id"]

REFUSED = {
    "input_reference": "videos are made from text alone here; remove it",
    "nvext.annotations": "annotations are not given here; remove it",
    "quality": "has no meaning here; remove it, or use num_inference_steps",
    "style": "has no meaning here; remove it, or say it in the prompt",
    "background": "has no meaning here; remove it, or say it in the prompt",
    "moderation": "prompts are not moderated here; remove it",
    "partial_images": "pictures are not sent before they are done; remove it",
    "output_compression": "is fixed here; remove it",
}


class VideoNvExt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The same settings where NVIDIA's clients put them."""

    fps: Int32 | None = None
    num_frames: Int32 | None = None
    negative_prompt: str | None = None
    num_inference_steps: Int32 | None = None
    guidance_scale: float | None = None
    seed: Seed | None = None


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    prompt: str
    size: str | None = None  # WIDTHxHEIGHT, or auto
    negative_prompt: str | None = None
    num_inference_steps: Int32 | None = None
    guidance_scale: float | None = None
    seed: Seed | None = None
    user: str | None = None  # accepted, not used
    nvext: VideoNvExt | None = None


class VideoBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/videos/generations, and the video model's request."""

    seconds: float | str | None = None  # OpenAI writes "4"
    fps: Int32 | None = None
    num_frames: Int32 | None = None
    output_format: str | None = None
    response_format: ResponseFormat = "b64_json"
    stream: bool = False


class JobBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/videos."""

    seconds: float | str | None = None
    fps: Int32 | None = None
    num_frames: Int32 | None = None
    output_format: str | None = None


class ImageBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/images/generations."""

    n: Int32 = 1
    output_format: str | None = None
    response_format: ResponseFormat = "b64_json"


@dataclass(frozen=True, slots=True)
class VideoRequest:
    ask: RequestedVideo
    response_format: ResponseFormat = "b64_json"
    stream: bool = False


def parse_video(data: bytes | str) -> VideoRequest:
    return check_video(decode_body(data, VideoBody, REFUSED))


def check_video(body: VideoBody | JobBody) -> VideoRequest:
    if body.output_format not in (None, "mp4", "gif"):
        raise RequestError(f"output_format: {str(body.output_format)[:40]!r}; one of mp4, gif")
    ask = _ask(
        body, seconds=_seconds(body.seconds), fps=_chosen(body, "fps"), num_frames=_chosen(body, "num_frames"),
        output_format=body.output_format,
    )  # fmt: skip
    if isinstance(body, JobBody):
        return VideoRequest(ask)
    return VideoRequest(ask, body.response_format, body.stream)


def check_images(body: ImageBody) -> VideoRequest:
    if body.output_format not in (None, *IMAGE_FORMATS):
        raise RequestError(f"output_format: {str(body.output_format)[:40]!r}; one of {', '.join(IMAGE_FORMATS)}")
    if not 1 <= body.n <= 10:
        raise RequestError(f"n: {body.n}; 1 to 10")
    for name in ("fps", "num_frames"):
        if body.nvext is not None and getattr(body.nvext, name) is not None:
            raise RequestError(f"nvext.{name}: pictures have no length; remove it")
    return VideoRequest(_ask(body, num_images=body.n, output_format=body.output_format), body.response_format)


def _ask(body: _Body, **more: Any) -> RequestedVideo:
    if not body.prompt.strip():
        raise RequestError("prompt: empty; say what is to be seen")
    names = ("negative_prompt", "num_inference_steps", "guidance_scale", "seed")
    values = {name: _chosen(body, name) for name in names}
    if values["guidance_scale"] is not None and not math.isfinite(values["guidance_scale"]):
        raise RequestError("guidance_scale: not a number; 0 to 100")
    return RequestedVideo(prompt=body.prompt, size=body.size, **values, **more)


def _chosen(body: _Body, name: str) -> Any:
    value = getattr(body, name)
    return getattr(body.nvext, name) if value is None and body.nvext is not None else value


def _seconds(value: float | str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        raise RequestError(f"seconds: {str(value)[:40]!r}; send a number, such as 4") from None


_DTYPES = {"seconds": np.float32, "guidance_scale": np.float32, "seed": np.uint64}


def tensors_of(ask: RequestedVideo) -> dict[str, bytes | Array]:
    tensors: dict[str, bytes | Array] = {}
    for name in RequestedVideo.__struct_fields__:
        value = getattr(ask, name)
        if isinstance(value, str):
            tensors[name] = value.encode()
        elif value is not None:
            tensors[name] = np.array([value], _DTYPES.get(name, np.int32))
    return tensors
