"""Messages between a video stub and its engine process.

    command frame   u32 VIDEO + msgpack Command          stub -> engine
    event frame     u32 VIDEO + msgpack Event            engine -> stub
    facts           msgpack PipelineFacts, in Hello      engine -> stub

Pings, pongs and hello are those of bireme/messages.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

VIDEO = 1  # the consumer number of these frames
VideoFormat = Literal["mp4", "gif", "frames"]
ImageFormat = Literal["png", "jpeg", "webp"]
VIDEO_FORMATS = ("mp4", "gif", "frames")  # frames: raw, (T, H, W, 3) uint8
IMAGE_FORMATS = ("png", "jpeg", "webp")
MEDIA_TYPES = {
    "mp4": "video/mp4",
    "gif": "image/gif",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
}


class PipelineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded pipeline accepts, and its defaults."""

    pipeline: str  # its class
    is_video: bool  # false: pictures only
    is_tested: bool = False
    frame_step: int = 1  # it makes n * frame_step + 1 frames
    width_step: int = 1  # width and height are multiples of these
    height_step: int = 1
    width: int
    height: int
    num_frames: int = 1
    fps: int = 16
    num_steps: int
    guidance_scale: float | None = None  # None: it has no such setting
    reports_steps: bool = True  # false: neither progress nor cancellation in the middle
    device: str = ""
    dtype: str = ""


class DiffusionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work, every rule applied: either a video or `num_images` pictures."""

    prompt: str
    negative_prompt: str = ""
    width: int
    height: int
    num_frames: int = 1  # delivered
    made_frames: int = 1  # what the pipeline makes for them: num_frames or more
    num_images: int = 0  # > 0: pictures
    fps: int = 1
    num_steps: int
    guidance_scale: float | None = None
    max_sequence_length: int | None = None
    seed: int  # of the first picture; the next has the next one
    output_format: VideoFormat | ImageFormat = "mp4"

    @property
    def total_steps(self) -> int:
        return self.num_steps * max(1, self.num_images)


class Details(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was made, in the client's form (JSON)."""

    v: int = 1
    size: str
    seed: int
    steps: int
    output_format: str
    num_frames: int | None = None
    generated_frames: int | None = None  # where the pipeline made more than asked for; the clip was cut
    fps: int | None = None
    seconds: float | None = None
    num_images: int | None = None
    guidance_scale: float | None = None


class SubmitDiffusion(msgspec.Struct, array_like=True, tag="g"):
    life: int
    number: int
    generation: DiffusionRequest


class AbortDiffusion(msgspec.Struct, array_like=True, tag="a"):
    life: int
    number: int


class Stepped(msgspec.Struct, array_like=True, tag="s"):
    """Sent at the start (step 0) and after each step."""

    number: int
    step: int
    total: int
    eta_s: float | None = None  # None: not known yet


class Made(msgspec.Struct, array_like=True, tag="m"):
    """The end: one encoded video, encoded pictures, or raw frames of this shape."""

    number: int
    parts: list[bytes]
    shape: tuple[int, int, int, int] | None  # of raw frames
    seconds: float


class Failed(msgspec.Struct, array_like=True, tag="f"):
    number: int
    error: str  # CODE: text


Command = SubmitDiffusion | AbortDiffusion
Event = Stepped | Made | Failed
encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
decode_facts = msgspec.msgpack.Decoder(PipelineFacts).decode


def details_of(work: DiffusionRequest) -> Details:
    if work.num_images:
        return Details(
            size=f"{work.width}x{work.height}", seed=work.seed, steps=work.num_steps,
            output_format=work.output_format, num_images=work.num_images, guidance_scale=work.guidance_scale,
        )  # fmt: skip
    return Details(
        size=f"{work.width}x{work.height}", seed=work.seed, steps=work.num_steps, output_format=work.output_format,
        num_frames=work.num_frames, generated_frames=work.made_frames if work.made_frames > work.num_frames else None,
        fps=work.fps, seconds=round(work.num_frames / work.fps, 3), guidance_scale=work.guidance_scale,
    )  # fmt: skip
