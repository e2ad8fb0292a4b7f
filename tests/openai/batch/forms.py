"""Uploads as clients send them."""

from __future__ import annotations

from typing import Any

FILES = "/v1/files"
FORM = {"content-type": "multipart/form-data; boundary=xyz"}
END = b"--xyz--\r\n"


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    of_file = b"" if filename is None else b'; filename="' + filename.encode() + b'"'
    return b'--xyz\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), of_file, content)


def form(content: bytes = b"{}\n", filename: str = "in.jsonl", **fields: str | None) -> bytes:
    """Return a body with a file and these fields; a field of None is left out."""
    given = {"purpose": "batch", **fields}
    texts = [part(name, value.encode()) for name, value in given.items() if value is not None]
    return b"".join([*texts, part("file", content, filename), END])


def post(bench: Any, body: bytes | tuple[bytes, ...], headers: dict[str, str] | None = None) -> Any:
    return bench.call("POST", FILES, body, {**FORM, **(headers or {})})


async def upload(
    bench: Any, content: bytes = b"{}\n", filename: str = "in.jsonl", headers: dict[str, str] | None = None,
    **fields: str,
) -> Any:  # fmt: skip
    return await post(bench, form(content, filename, **fields), headers).end()


async def ask(
    bench: Any, path: str, query: str = "", method: str = "GET", headers: dict[str, str] | None = None
) -> Any:
    return await bench.call(method, path, headers=headers, query=query).end()
