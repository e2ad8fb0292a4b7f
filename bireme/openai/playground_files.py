"""The playground's files: read once, served from memory, open to all.

A path is looked up in a table of the files that were found at start, never on disk, so no path leads elsewhere. The
page itself may load nothing but these files and call nothing but this server.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bireme.openai.http.call import NOT_MODIFIED, Call, Header

FOLDER = Path(__file__).with_name("playground")
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# Trusted types: the browser itself refuses innerHTML and its like, so what a model writes can't become markup.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "media-src blob:",
        "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'",
    )
)  # fmt: skip
_HEADERS: tuple[Header, ...] = (
    (b"cache-control", b"no-cache"),  # kept, but checked each time: an upgrade shows at once
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    headers: tuple[Header, ...]
    etag: bytes


class PlaygroundFiles:
    """`/` and `/playground/...`."""

    def __init__(self, folder: Path) -> None:
        self._files = dict(_read(folder))

    @property
    def paths(self) -> frozenset[str]:
        """The served paths; no key is needed for any of them."""
        return frozenset(self._files)

    async def get(self, call: Call) -> None:
        """Answer a call for one of `paths`: the file, or 304 where the client has it."""
        file = self._files[call.path]
        if _has(call.header(b"if-none-match"), file.etag):
            await call.reply(NOT_MODIFIED, b"", *file.headers)
        else:
            await call.reply(200, file.body, *file.headers)


@functools.cache
def packaged_files() -> PlaygroundFiles:
    """Return the files of this package, read by the first who asks."""
    return PlaygroundFiles(FOLDER)


def _read(folder: Path) -> Iterator[tuple[str, _File]]:
    """Yield path and file; files of other kinds are not the page's."""
    for path in sorted(folder.rglob("*")):
        kind = _TYPES.get(path.suffix)
        if kind is None or not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        yield "/" if name == "index.html" else f"/playground/{name}", _file(path.read_bytes(), kind)


def _file(body: bytes, kind: bytes) -> _File:
    etag = b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode()
    return _File(body, ((b"content-type", kind), (b"etag", etag), *_HEADERS), etag)


def _has(if_none_match: bytes, etag: bytes) -> bool:
    tags = [tag.strip().removeprefix(b"W/") for tag in if_none_match.split(b",")]
    return etag in tags or b"*" in tags
