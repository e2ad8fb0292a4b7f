"""Encoded bytes -> RGB pixels, by Pillow, for four formats and within limits.

A header's claims are checked before anything is allocated. Whatever Pillow raises becomes one sentence of ours: its
texts hold memory addresses. Every picture ends as 8-bit RGB, turned as its EXIF says, transparency flattened on white,
the first frame of several.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from PIL import Image

from bireme.config import MediaLimits
from bireme.errors import BiremeError, RequestError

FORMATS = "PNG, JPEG, WebP or GIF"
_HASH_DOMAIN = b"bireme.image.1\0"  # no other hash input begins like this
_WHITE = (255, 255, 255, 255)
_MAX_JPEG_SCANS = 200  # a progressive picture has about ten; each costs a pass over all pixels
_EXIF_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DecodedImage:
    pixels: Pixels  # (height, width, 3), RGB
    content_hash: bytes  # BLAKE3 over mode, shape and pixels: names the picture in block hashes and caches

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes


def kind_of(content: bytes) -> str:
    """Return the format by its first bytes, in Pillow's spelling; "" for others."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if content.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    return "GIF" if content.startswith((b"GIF87a", b"GIF89a")) else ""


def decode_image(
    content: bytes, limits: MediaLimits, take_pixels: Callable[[int], None] = lambda num_pixels: None
) -> DecodedImage:
    """Return the picture; CPU time and memory are proportional to its pixels. Raises RequestError.

    `take_pixels`: is told their number before they are decoded, and may raise.
    """
    kind = kind_of(content)
    if not kind:
        raise RequestError(f"not a picture that is understood here; send {FORMATS}")
    try:
        pixels = _decode(content, kind, limits, take_pixels)
    except BiremeError:
        raise
    except Image.DecompressionBombError:
        raise RequestError(f"too many pixels; at most {limits.max_pixels} (media.max_pixels)") from None
    except Exception:  # Pillow's decoders raise a dozen kinds on damaged bytes
        raise RequestError(f"the {kind} picture is damaged or truncated") from None
    return DecodedImage(pixels, content_hash(pixels))


def content_hash(pixels: Pixels) -> bytes:
    """Return 32 bytes; pictures of equal bytes but different shape differ."""
    height, width, channels = pixels.shape
    assert channels == 3, "pictures are RGB"
    hasher = blake3(_HASH_DOMAIN + b"RGB\0" + struct.pack("<II", height, width))
    hasher.update(np.ascontiguousarray(pixels).data)
    return hasher.digest()


def _decode(content: bytes, kind: str, limits: MediaLimits, take_pixels: Callable[[int], None]) -> Pixels:
    if kind == "WEBP":  # Pillow allocates the canvas on opening one; the others wait for load()
        _check_size(_webp_size(content), limits)
    if kind == "JPEG" and content.count(b"\xff\xda") > _MAX_JPEG_SCANS:
        raise RequestError(f"a JPEG of more than {_MAX_JPEG_SCANS} scans; save it anew")
    with Image.open(io.BytesIO(content), formats=(kind,)) as image:
        _check_size(image.size, limits)
        take_pixels(image.width * image.height)
        image.seek(0)
        image.load()
        rgb, turn = _to_rgb(image), _turn_of(image)
        return np.asarray(rgb if turn is None else rgb.transpose(turn))


def _check_size(size: tuple[int, int], limits: MediaLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise RequestError(f"{width} x {height} pixels; at least 1 x 1")
    if width * height > limits.max_pixels:
        raise RequestError(f"{width} x {height} pixels; at most {limits.max_pixels} in all (media.max_pixels)")
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise RequestError(
            f"{width} x {height} pixels; the longer side may have {limits.max_aspect_ratio:g} times"
            " the shorter (media.max_aspect_ratio)"
        )


def _webp_size(content: bytes) -> tuple[int, int]:
    chunk = content[12:16]
    if chunk == b"VP8X":
        low, high = struct.unpack_from("<HB", content, 24), struct.unpack_from("<HB", content, 27)
        return 1 + low[0] + (low[1] << 16), 1 + high[0] + (high[1] << 16)
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk != b"VP8 ":
        raise ValueError("no WebP chunk that begins a picture")
    width, height = struct.unpack_from("<HH", content, 26)
    return width & 0x3FFF, height & 0x3FFF


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return Image.fromarray(_from_16_bit(image)).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
    canvas = Image.new("RGBA", image.size, _WHITE)
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas.convert("RGB")


def _turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return the turn that EXIF asks for; damaged EXIF asks for none."""
    try:
        return _TURNS.get(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # Pillow's EXIF reader raises many kinds; the pixels are good all the same
        return None


def _from_16_bit(image: Image.Image) -> Pixels:
    """Scale 16-bit gray to 8; convert() would clip all above 255 to white."""
    gray: npt.NDArray[Any] = np.asarray(image).astype(np.uint32)
    result = np.minimum((gray + 128) // 257, 255).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        result[gray == transparent] = 255
    return result
