"""A multipart/form-data body with one file, which goes to disk as it comes; nothing of it is kept in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bireme.errors import RequestError
from bireme.openai.http.error_replies import HttpError

_MAX_FIELDS, _MAX_FIELD_BYTES, _MAX_NAME = 16, 4096, 255
_MAX_HEADER_BYTES = 8 << 10  # of one part
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Upload:
    """`feed` and `close` may block on the disk. The file's content is at `path`, whatever comes of it."""

    def __init__(self, content_type: bytes, path: Path, max_bytes: int) -> None:
        """Raises RequestError for another type, OSError when the disk is full."""
        from python_multipart.multipart import MultipartParser, parse_options_header

        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise HttpError(415, "content-type: send multipart/form-data", code="unsupported_media_type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._parse_options, self._max_bytes = parse_options_header, max_bytes
        self._header, self._value, self._num_header_bytes = b"", b"", 0
        self._name, self._field = "", b""
        self._is_file = self._is_whole = False
        callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._check_name,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        self._parser = MultipartParser(options[b"boundary"], callbacks)
        self._file = path.open("xb")

    def feed(self, data: bytes) -> None:
        """Raises RequestError, HttpError 413, OSError when the disk is full."""
        from python_multipart.exceptions import FormParserError

        try:
            self._parser.write(data)
        except FormParserError as error:
            raise RequestError(f"the form can't be read ({str(error)[:200]}); send multipart/form-data") from error

    def close(self) -> None:
        self._file.close()

    def check(self) -> str:
        """Return the file's name, after the last part. Raises RequestError when the form has no end or no file."""
        if not self._is_whole:
            raise RequestError("the form is cut off; send it to its last boundary")
        if self.filename is None:
            raise RequestError("file: missing; send the content as a part of this name with a filename")
        return self.filename

    def _begin(self) -> None:
        self._name, self._field, self._is_file = "", b"", False
        self._header, self._value, self._num_header_bytes = b"", b"", 0

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._value += data[start:end]

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > _MAX_HEADER_BYTES:
            raise RequestError(
                f"a part's headers have more than {_MAX_HEADER_BYTES} bytes; send its name and type alone"
            )

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = self._parse_options(self._value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if (given := options.get(b"filename")) is not None:
                self._is_file = True
                self._take_filename(given.decode("utf-8", "replace"))
        self._header, self._value = b"", b""

    def _take_filename(self, given: str) -> None:
        """It is shown, and never names anything on this disk."""
        if self.filename is not None or self._name != "file":
            raise RequestError(f"{self._name[:80] or 'a part'}: send one file, as `file`")
        name = re.split(r"[/\\]", given)[-1]
        if not name or len(name) > _MAX_NAME or _CONTROL.search(name):
            raise RequestError(
                f"file: its name {given[:80]!r}; 1 to {_MAX_NAME} characters, without control characters"
            )
        self.filename = name

    def _check_name(self) -> None:
        if not self._name:
            raise RequestError("a part of the form has no name; send Content-Disposition: form-data; name=...")
        if self._name in self.fields:
            raise RequestError(f"{self._name[:80]}: sent twice; send it once")
        if len(self.fields) >= _MAX_FIELDS:
            raise RequestError(f"the form has more than {_MAX_FIELDS} fields; send fewer")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._field += data[start:end]
            if len(self._field) > _MAX_FIELD_BYTES:
                raise RequestError(f"{self._name[:80]}: more than {_MAX_FIELD_BYTES} bytes; shorten it")
            return
        self.size += end - start
        if self.size > self._max_bytes:
            raise too_large(self._max_bytes)
        self._file.write(data[start:end])

    def _end_part(self) -> None:
        if not self._is_file:
            try:
                self.fields[self._name] = self._field.decode()
            except UnicodeDecodeError as error:
                raise RequestError(f"{self._name[:80]}: not UTF-8 (byte {error.start}); send UTF-8 text") from error

    def _end(self) -> None:
        self._is_whole = True


def too_large(max_bytes: int) -> HttpError:
    message = f"file: larger than frontend.files.max_file_bytes {max_bytes}; split it"
    return HttpError(413, message, code="too_large", headers=((b"connection", b"close"),))
