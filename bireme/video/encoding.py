"""Frames to files: mp4 (H.264) by PyAV, GIF and pictures by Pillow. Imported where frames are made."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.uint8]  # (T, H, W, 3)
_GIF_TICKS = 100  # a GIF counts hundredths of a second


def encode_video(frames: Frames, fps: int, output_format: str) -> bytes:
    return encode_gif(frames, fps) if output_format == "gif" else encode_mp4(frames, fps)


def encode_mp4(frames: Frames, fps: int) -> bytes:
    """Return H.264 in 4:2:0 (every player's form), index first, so that it plays while it loads."""
    with tempfile.TemporaryDirectory(prefix="bireme-video-") as folder:  # moving the index reads the file again
        path = Path(folder) / "video.mp4"
        _write_mp4(path, _even(frames), fps)
        return path.read_bytes()


def _write_mp4(path: Path, frames: Frames, fps: int) -> None:
    import av

    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1  # the engine's threads are limited
        stream.options = {"preset": "veryfast", "crf": "18"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def _even(frames: Frames) -> Frames:
    """H.264 in 4:2:0 needs even sides: repeat the last row or column where one is missing."""
    odd = frames.shape[1] % 2, frames.shape[2] % 2
    return np.pad(frames, ((0, 0), (0, odd[0]), (0, odd[1]), (0, 0)), "edge") if any(odd) else frames


def encode_gif(frames: Frames, fps: int) -> bytes:
    """Return an endless GIF; frame times are rounded to hundredths of a second, their sum is right."""
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in frames]
    ends = [round(Fraction(_GIF_TICKS * (index + 1), fps)) for index in range(len(pictures))]
    times_ms = [10 * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
    file = io.BytesIO()
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=times_ms, loop=0, optimize=False)
    return file.getvalue()


def encode_image(frame: Frames, output_format: str) -> bytes:
    """`frame` is (H, W, 3)."""
    from PIL import Image

    file = io.BytesIO()
    options = {"quality": 95} if output_format in ("jpeg", "webp") else {}
    Image.fromarray(frame).save(file, output_format.upper(), **options)
    return file.getvalue()
