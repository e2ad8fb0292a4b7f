import io
import re
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from bireme.config import MediaLimits
from bireme.errors import RequestError
from bireme.multimodal.images import content_hash, decode_image, kind_of

LIMITS = MediaLimits()
CORNERS = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[0, 0, 0], [255, 255, 255], [90, 90, 90]]], np.uint8)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels_of(content, **limits):
    return decode_image(content, MediaLimits(**limits)).pixels


def png_chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(width, height, idat=b"", bits=8, color=2):
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", idat) + png_chunk(b"IEND", b"")


def refusal(content, **limits):
    with pytest.raises(RequestError) as refused:
        decode_image(content, MediaLimits(**limits))
    text = str(refused.value)
    assert not re.search(r"0x[0-9a-f]{4}|BytesIO|/|Traceback", text), text
    return text


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_pixels_come_out_as_they_went_in(kind):
    assert np.array_equal(pixels_of(encoded(Image.fromarray(CORNERS), kind, lossless=True)), CORNERS)


def test_a_jpeg_is_decoded():
    pixels = pixels_of(encoded(Image.new("RGB", (16, 9), (200, 30, 40)), "JPEG"))
    assert pixels.shape == (9, 16, 3) and pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - [200, 30, 40]).max() < 4


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "RGB"])
def test_every_png_mode_becomes_rgb(mode):
    pixels = pixels_of(encoded(Image.new("RGB", (3, 2), "white").convert(mode)))
    assert pixels.shape == (2, 3, 3) and (pixels == 255).all()


def test_transparency_is_flattened_on_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 128))
    assert pixels_of(encoded(image)).tolist() == [[[255, 255, 255], [127, 127, 127]]]


def test_a_transparent_palette_entry_is_flattened_on_white():
    image = Image.new("P", (2, 1), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    assert pixels_of(encoded(image, transparency=0)).tolist() == [[[255, 255, 255], [0, 0, 255]]]


def test_a_transparent_color_is_flattened_on_white():
    image = Image.new("RGB", (2, 1), (255, 0, 0))
    image.putpixel((1, 0), (0, 0, 255))
    assert pixels_of(encoded(image, transparency=(255, 0, 0))).tolist() == [[[255, 255, 255], [0, 0, 255]]]


def test_sixteen_bit_gray_is_scaled_not_clipped():
    gray = np.array([[0, 32768, 65535, 300]], np.uint16)
    assert pixels_of(encoded(Image.fromarray(gray)))[0, :, 0].tolist() == [0, 128, 255, 1]


def test_a_transparent_gray_of_sixteen_bits_is_flattened_on_white():
    rows = zlib.compress(b"\0" + struct.pack(">3H", 0, 300, 65535))
    plain = png_of(3, 1, rows, bits=16, color=0)
    content = plain[:33] + png_chunk(b"tRNS", struct.pack(">H", 300)) + plain[33:]
    assert pixels_of(plain)[0, :, 0].tolist() == [0, 1, 255]
    assert pixels_of(content)[0, :, 0].tolist() == [0, 255, 255]


def test_sixteen_bit_color_is_scaled():
    row = b"\0" + struct.pack(">6H", 0, 32768, 65535, 65535, 0, 257)
    pixels = pixels_of(png_of(2, 1, zlib.compress(row), bits=16))
    assert np.abs(pixels[0].astype(int) - [[0, 128, 255], [255, 0, 1]]).max() <= 1


def test_cmyk_becomes_rgb():
    pixels = pixels_of(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(pixels[4, 4].astype(int) - [255, 0, 0]).max() < 8


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(kind):
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue", "green")]
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=10, lossless=True)
    pixels = pixels_of(content)
    assert pixels.shape == (4, 4, 3) and pixels[2, 2].tolist() == [255, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    """The stored pixels are what a camera held that way records; all eight show the same picture."""
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
        8: lambda a: np.rot90(a, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(undo[orientation](CORNERS)))
    assert np.array_equal(pixels_of(encoded(stored, exif=exif)), CORNERS)


def test_damaged_exif_does_not_lose_the_picture():
    content = encoded(Image.fromarray(CORNERS), exif=b"Exif\0\0II*\0\xff\xff\xff\xffgarbage")
    assert np.array_equal(pixels_of(content), CORNERS)


def test_exif_that_pillow_can_not_read_does_not_lose_the_picture(monkeypatch):
    def fail(image):
        raise struct.error("unpack requires a buffer of 12 bytes")

    monkeypatch.setattr(PngImageFile, "getexif", fail)
    assert np.array_equal(pixels_of(encoded(Image.fromarray(CORNERS))), CORNERS)


def test_a_single_pixel_is_a_picture():
    assert pixels_of(encoded(Image.new("RGB", (1, 1), "red"))).tolist() == [[[255, 0, 0]]]


def test_a_sliver_is_refused():
    assert "200 times" in refusal(encoded(Image.new("L", (201, 1))))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_pixels_beyond_the_limit_are_refused_with_both_numbers(kind):
    content = encoded(Image.new("RGB", (20, 10)), kind)
    assert "20 x 10 pixels; at most 199 in all (media.max_pixels)" in refusal(content, max_pixels=199)
    assert pixels_of(content, max_pixels=200).shape == (10, 20, 3)


def webp_claiming(width, height):
    lossless = struct.pack("<4sIBI", b"VP8L", 5, 0x2F, (width - 1) | (height - 1) << 14)
    body = b"WEBP" + lossless + b"\0"
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif_claiming(screen, frame):
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0, 0, 0)
    return head + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x08\x01\0\0;"


BOMBS = {
    "png": png_of(60000, 60000, zlib.compress(b"\0" * 1000)),
    "gif": gif_claiming((60000, 60000), (60000, 60000)),
    "gif frame": gif_claiming((1, 1), (60000, 60000)),
    "webp": webp_claiming(16000, 16000),
    "webp canvas": b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0" + (0x3FFF).to_bytes(3, "little") * 2,
    "jpeg": b"\xff\xd8\xff\xc0\0\x11\x08" + struct.pack(">HH", 60000, 60000) + b"\x03\x01\x11\0\x02\x11\0\x03\x11\0",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_its_header(name):
    assert "max_pixels" in refusal(BOMBS[name])


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_memory_is_taken(name):
    """An address space of 200 MB beyond what the imports took holds no 16000 x 16000 canvas."""
    code = (
        "import resource, sys, bireme.multimodal.images as images, bireme.config as config, bireme.errors as errors\n"
        "from PIL import Image; Image.init()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000,) * 2)\n"
        "try: images.decode_image(bytes.fromhex(sys.argv[1]), config.MediaLimits())\n"
        "except errors.RequestError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, BOMBS[name].hex()], capture_output=True, text=True, timeout=60)
    assert "max_pixels" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["webp", "webp canvas"])
def test_a_webp_s_size_is_known_before_pillow_allocates_its_canvas(monkeypatch, name):
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    assert "max_pixels" in refusal(BOMBS[name])


@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_webp_s_size_is_read_from_each_kind_of_header(lossless, mode):
    content = encoded(Image.new(mode, (301, 203), (1, 2, 3) + (128,) * (mode == "RGBA")), "WEBP", lossless=lossless)
    assert "301 x 203 pixels" in refusal(content, max_pixels=301 * 203 - 1)
    assert pixels_of(content, max_pixels=301 * 203).shape == (203, 301, 3)


def test_a_stream_that_inflates_to_more_than_its_size_is_cut_there():
    assert pixels_of(png_of(2, 1, zlib.compress(b"\0" * 50_000_000))).shape == (1, 2, 3)


def test_a_jpeg_of_a_thousand_scans_is_refused():
    content = encoded(Image.new("RGB", (16, 16)), "JPEG", progressive=True)
    assert "200 scans" in refusal(content[:-2] + b"\xff\xda\0\x08\x01\x01\0\0\0\0" * 1000 + content[-2:])
    assert pixels_of(content).shape == (16, 16, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_a_truncated_picture_is_refused(kind, share):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    content = encoded(Image.fromarray(noise), kind)
    assert "damaged or truncated" in refusal(content[: int(len(content) * share)])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_damaged_picture_is_decoded_or_refused_in_our_words(kind):
    content = bytearray(encoded(Image.fromarray(CORNERS.repeat(16, 0).repeat(16, 1)), kind))
    random = np.random.default_rng(1)
    for _ in range(200):
        damaged = content.copy()
        for at in random.integers(12, len(content), 3):
            damaged[at] = random.integers(256)
        try:
            decode_image(bytes(damaged), LIMITS)
        except RequestError as error:
            assert not re.search(r"0x[0-9a-f]{4}|BytesIO|/", str(error))


OTHERS = {
    "empty": b"",
    "text": b"hello",
    "html": b"<!doctype html><img>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0",
    "pdf": b"%PDF-1.7",
    "pickle": b"\x80\x04\x95\x10\0\0\0",
    "zip": b"PK\x03\x04",
    "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
    "avif": b"\0\0\0 ftypavif",
    "mp4": b"\0\0\0 ftypisom",
    "ico": b"\0\0\x01\0",
    "polyglot": b"GIF88a\x89PNG",
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_format_is_refused(name):
    assert "send PNG, JPEG, WebP or GIF" in refusal(OTHERS[name])


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "JPEG2000", "PPM", "ICO", "TGA", "PCX", "EPS"])
def test_what_pillow_could_read_beside_is_refused(kind):
    assert kind_of(encoded(Image.new("RGB", (8, 8)), kind)) == ""


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_file_that_is_another_behind_its_first_bytes_is_not_handed_to_another_decoder(kind):
    magic = {"PNG": b"\x89PNG\r\n\x1a\n", "JPEG": b"\xff\xd8\xff", "GIF": b"GIF89a", "WEBP": b"RIFF\0\0\0\0WEBP"}[kind]
    tiff = encoded(Image.new("RGB", (8, 8)), "TIFF")
    assert "damaged" in refusal(magic + tiff)


def test_only_the_decoder_of_the_first_bytes_is_asked(monkeypatch):
    asked, real = [], Image.open
    monkeypatch.setattr(
        Image, "open", lambda file, **options: asked.append(options["formats"]) or real(file, **options)
    )
    pixels_of(encoded(Image.new("RGB", (2, 2)), "GIF"))
    assert asked == [("GIF",)]


def test_the_hash_is_of_the_pixels_not_of_the_file():
    image = Image.fromarray(CORNERS)
    first, second = decode_image(encoded(image), LIMITS), decode_image(encoded(image, "WEBP", lossless=True), LIMITS)
    assert first.content_hash == second.content_hash and len(first.content_hash) == 32


def test_the_hash_differs_by_a_pixel_and_by_shape():
    other = CORNERS.copy()
    other[0, 0, 0] -= 1
    shapes = [CORNERS, other, CORNERS.reshape(3, 2, 3), CORNERS.reshape(1, 6, 3), CORNERS.reshape(6, 1, 3)]
    assert len({content_hash(pixels) for pixels in shapes}) == 5


def test_the_hash_does_not_depend_on_how_pixels_lie_in_memory():
    assert content_hash(CORNERS[:, ::-1]) == content_hash(CORNERS[:, ::-1].copy())
