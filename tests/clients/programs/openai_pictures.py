"""The official package shows a picture, by a data URL, and asks what is on it."""

import base64
import os
import struct
import zlib

import openai


def png(color: bytes, size: int = 64) -> bytes:
    """Return a square of one color."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + color * size) * size
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


url = "data:image/png;base64," + base64.b64encode(png(b"\xff\0\0")).decode()
content = [
    {"type": "text", "text": "What colour is it?"},
    {"type": "image_url", "image_url": {"url": url}},
]
answer = openai.OpenAI(max_retries=0).chat.completions.create(
    model=os.environ["MODEL"], messages=[{"role": "user", "content": content}], max_tokens=20
)
assert answer.choices[0].message.content and answer.usage.prompt_tokens > 16, answer
print("ok")
