"""Pictures on this host, by file: URL, only inside the folder that the deployment has named.

Links are resolved first, and the place they end at counts; the open file is asked again, so that a link swapped in
between gains nothing. What is outside, missing or unreadable gets the same answer: a request can't find out what
exists.
"""

from __future__ import annotations

import os
import stat
import urllib.parse
from pathlib import Path

from bireme.config import MediaLimits
from bireme.errors import ConfigError, RequestError
from bireme.multimodal.budget import PictureBudget

_REFUSED = "no such picture in this deployment's allowed_local_media_path"
# no terminal, no wait for the writer of a FIFO, no target of a link put there meanwhile
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class LocalFiles:
    """Reads below one folder. Raises ConfigError when it is missing."""

    def __init__(self, limits: MediaLimits) -> None:
        self._root: Path | None = None
        if limits.allowed_local_media_path:
            self._root = _folder(limits.allowed_local_media_path)

    def read(self, text: str, budget: PictureBudget) -> bytes:
        """Return the file's bytes, which the caller counts; blocks. Raises RequestError."""
        if self._root is None:
            raise RequestError("file: URLs are off here (media.allowed_local_media_path); send a data: URL")
        path = _path_of(text)
        try:
            return self._read(path.resolve(strict=True), budget)
        except (OSError, RuntimeError, ValueError):  # missing, forbidden, a loop of links, a NUL in the name
            raise RequestError(_REFUSED) from None

    def _read(self, path: Path, budget: PictureBudget) -> bytes:
        self._check_inside(path)
        with open(os.open(path, _FLAGS), "rb") as file:
            self._check_inside(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")))
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise RequestError(_REFUSED)
            budget.check(status.st_size)
            content = file.read(budget.limit + 1)  # it may be growing
        budget.check(len(content))
        return content

    def _check_inside(self, path: Path) -> None:
        assert self._root is not None
        if not path.is_relative_to(self._root):
            raise RequestError(_REFUSED)


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute() or not path.is_dir():
        raise ConfigError(f"media.allowed_local_media_path: {text!r}; the absolute path of a folder is needed")
    return path.resolve()


def _path_of(text: str) -> Path:
    try:
        parts = urllib.parse.urlsplit(text)
        is_local = parts.netloc in ("", "localhost")
    except ValueError:
        is_local = False
    if not is_local or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise RequestError("not a file: URL of the form file:///folder/picture.png")
    return Path(urllib.parse.unquote(parts.path, errors="surrogateescape"))
