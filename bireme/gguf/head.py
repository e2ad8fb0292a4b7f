"""The head of a GGUF file: metadata and where each tensor lies. Weights are not touched.

The format is ggml's docs/gguf.md, versions 2 and 3, little endian. Each count, length, offset and type is compared with
the file before anything of that size is made, so that a head that lies costs little and is refused by name.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bireme.errors import ConfigError

SUFFIX = ".gguf"
MAX_HEAD_BYTES = 64 << 20  # the largest vocabularies with their merges take 13 MiB
_MAX_ENTRIES = 1 << 16  # keys, and tensors of a part
_MAX_STRINGS = 1 << 21  # in an array
_MAX_NAME_BYTES = 1 << 10
_MAX_PARTS = 1 << 10
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
_READ_BYTES = 4 << 20  # at a time
_DAMAGED = "the file is damaged or cut short; fetch it again"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a tensor's values are kept (ggml-common.h): `num_values` of a row in `num_bytes`."""

    name: str
    num_values: int
    num_bytes: int


# By number in the file, ggml.h's enum ggml_type. What it has beyond these can't be read: `_UNREAD`.
TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    30: BlockType("BF16", 1, 2),
}
_UNREAD = {
    9: "Q8_1", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. Its values are `shape[-1]` a row, each row whole blocks."""

    name: str
    shape: tuple[int, ...]  # slowest first, as torch has it
    type: BlockType
    path: Path
    begin: int  # in bytes from the file's begin

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.num_values * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings as in the file: 8 bytes of length before each. Decoded when asked for."""

    count: int
    data: bytes

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        """Raises UnicodeDecodeError."""
        at, data = 0, self.data
        for _ in range(self.count):
            end = at + 8 + int.from_bytes(data[at : at + 8], "little")
            yield data[at + 8 : end].decode()
            at = end


@dataclass(frozen=True, slots=True)
class GgufHead:
    """What a GGUF file says of itself, all its parts together."""

    paths: tuple[Path, ...]  # parts in order
    metadata: Mapping[str, Any]  # int, float, bool, str, Strings, or a numpy array of one dimension
    tensors: Mapping[str, TensorInfo]

    @property
    def name(self) -> str:
        return self.paths[0].name

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._of_kind(key, str, "a text", default))

    def flag(self, key: str, default: bool | None = None) -> bool:
        return bool(self._of_kind(key, bool, "true or false", default))

    def integer(self, key: str, default: int | None = None, *, lowest: int = 0, highest: int = 1 << 40) -> int:
        value = int(self._of_kind(key, int, "a whole number", default))
        if not lowest <= value <= highest:
            raise self.wrong(key, f"{lowest} to {highest} is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self._of_kind(key, float, "a number", default))
        if not math.isfinite(value):
            raise self.wrong(key, "a finite number is expected")
        return value

    def strings(self, key: str) -> list[str]:
        try:
            return list(self._of_kind(key, Strings, "an array of texts", None))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.name}: {key}: not valid UTF-8 ({error.reason}); {_DAMAGED}") from error

    def numbers(self, key: str, count: int) -> list[Any]:
        """Return an array of numbers, which has to have `count` of them."""
        found = self._of_kind(key, np.ndarray, "an array of numbers", None)
        if len(found) != count:
            raise ConfigError(f"{self.name}: {key}: {len(found)} numbers, {count} are expected; {_DAMAGED}")
        return list(found.tolist())

    def wrong(self, key: str, what: str) -> ConfigError:
        """Return the error for a key whose value does not do."""
        return ConfigError(f"{self.name}: {key}: {_shown(self.metadata.get(key))}; {what}; convert the model again")

    def _of_kind(self, key: str, kind: type, what: str, default: Any) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise ConfigError(f"{self.name}: {key} is missing, {what}; convert the model again, with a newer converter")
        is_flag = isinstance(value, bool)
        if (kind is float and isinstance(value, int) and not is_flag) or (
            isinstance(value, kind) and is_flag == (kind is bool)
        ):
            return value
        raise self.wrong(key, f"{what} is expected")


def read_head(file: str | Path) -> GgufHead:
    """Read the head of a GGUF file, with those of its other parts where it is one of several. Raises ConfigError."""
    paths = part_paths(Path(file))
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    for number, path in enumerate(paths):
        own, infos = _read_part(path)
        count = own.get("split.count", 1)
        if (count, own.get("split.no", 0)) != (len(paths), number) and not (len(paths) == 1 and count in (0, 1)):
            raise ConfigError(
                f"{path.name}: it says that it is part {own.get('split.no', 0)!s:.20} (from 0) of {count!s:.20}, its"
                f" name and folder that it is {number} of {len(paths)}; name parts as NAME-00001-of-0000N.gguf"
            )
        metadata = {**own, **metadata}  # the first part's count
        for info in infos:
            if tensors.setdefault(info.name, info) is not info:
                raise ConfigError(f"{path.name}: tensor {_shown(info.name)} is there twice; {_DAMAGED}")
    told = metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1 and told != len(tensors):
        raise ConfigError(f"{paths[0].name}: split.tensors.count: {told!s:.20}, but all parts have {len(tensors)}")
    return GgufHead(paths, metadata, tensors)


def part_paths(file: Path) -> tuple[Path, ...]:
    """Return all parts of a file, whichever of them it is, in order. Raises ConfigError for one that is not there."""
    found = _PART.fullmatch(file.name)
    if found is None:
        return (file,)
    count, stem = int(found["count"]), found["stem"]
    if not 1 <= int(found["number"]) <= count <= _MAX_PARTS:
        raise ConfigError(f"{file.name}: part {found['number']} of {count}; parts are numbered from 00001")
    paths = tuple(file.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path.name} is missing beside {file.name}, which is one of {count} parts; fetch it")
    return paths


def _read_part(path: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    try:
        with path.open("rb", buffering=0) as file:
            cursor = _Cursor(file, path.name)
            metadata, num_tensors = _read_metadata(cursor)
            return metadata, _read_tensors(cursor, path, metadata, num_tensors)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror or error}); check `model`") from error


def _read_metadata(cursor: _Cursor) -> tuple[dict[str, Any], int]:
    if (magic := cursor.take(4)) != b"GGUF":
        raise cursor.wrong(f"begins with {magic!r}, not with b'GGUF': it is no GGUF file; check `model`")
    version = cursor.scalar("I")
    if version not in (2, 3):
        what = "its bytes are in big-endian order" if version & 0xFFFF == 0 else "versions 2 and 3 are read"
        raise cursor.wrong(f"version {version}; {what}; convert the model again")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    for what, count, smallest in (("tensors", num_tensors, 24), ("keys", num_keys, 13)):
        if count > _MAX_ENTRIES or count * smallest > cursor.size:
            raise cursor.wrong(f"{count} {what} in {cursor.size} bytes, at most {_MAX_ENTRIES}; {_DAMAGED}")
    metadata: dict[str, Any] = {}
    for number in range(num_keys):
        cursor.where = f"key {number}"
        key = cursor.text(_MAX_NAME_BYTES)
        cursor.where = key
        if key in metadata:
            raise cursor.wrong(f"is there twice; {_DAMAGED}")
        metadata[key] = cursor.value()
    return metadata, num_tensors


def _read_tensors(cursor: _Cursor, path: Path, metadata: Mapping[str, Any], num_tensors: int) -> list[TensorInfo]:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.where = "general.alignment"
        raise cursor.wrong(f"{_shown(alignment)}; a power of two from 8 to {_MAX_ALIGNMENT} is expected; {_DAMAGED}")
    found = []
    for number in range(num_tensors):
        cursor.where = f"tensor {number}"
        name = cursor.text(_MAX_NAME_BYTES)
        cursor.where = name
        num_dimensions = cursor.scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise cursor.wrong(f"{num_dimensions} dimensions, 1 to {_MAX_DIMENSIONS} are possible; {_DAMAGED}")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
        block_type = _block_type(cursor, cursor.scalar("I"))
        if not all(1 <= size <= cursor.size * 64 for size in shape) or shape[-1] % block_type.num_values:
            raise cursor.wrong(
                f"shape {list(shape)}; sizes from 1 on, the last one a multiple of {block_type.num_values}"
                f" ({block_type.name}), are possible; {_DAMAGED}"
            )
        found.append(TensorInfo(name, shape, block_type, path, cursor.scalar("Q")))
    data = -(-cursor.at // alignment) * alignment
    return _placed(cursor, found, data, alignment)


def _placed(cursor: _Cursor, found: Sequence[TensorInfo], data: int, alignment: int) -> list[TensorInfo]:
    """Return tensors with their places in the file, none of which share a byte."""
    placed, end = [], data
    for info in sorted(found, key=lambda info: info.begin):
        begin, cursor.where = data + info.begin, info.name
        if info.begin % alignment:
            raise cursor.wrong(f"offset {info.begin} is no multiple of the alignment, {alignment}; {_DAMAGED}")
        if begin + info.num_bytes > cursor.size:
            raise cursor.wrong(
                f"{info.type.name} {list(info.shape)} at {begin} ends at {begin + info.num_bytes}, the file at"
                f" {cursor.size}; {_DAMAGED}"
            )
        if begin < end:
            raise cursor.wrong(f"begins at {begin}, within another tensor, which ends at {end}; {_DAMAGED}")
        end = begin + info.num_bytes
        placed.append(TensorInfo(info.name, info.shape, info.type, info.path, begin))
    return placed


def _block_type(cursor: _Cursor, number: int) -> BlockType:
    if number in TYPES:
        return TYPES[number]
    if number in _UNREAD:
        known = ", ".join(block_type.name for block_type in TYPES.values())
        raise cursor.wrong(f"is {_UNREAD[number]}, which is not read (read are {known}); take a file with other types")
    raise cursor.wrong(f"type {number}; there is no such type; {_DAMAGED}, or convert the model again")


class _Cursor:
    """Reads a head from its begin, never beyond the file or MAX_HEAD_BYTES. `where`: for errors, what is read."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._buffer = bytearray()
        self.size = os.fstat(file.fileno()).st_size
        self.at, self.where = 0, "its begin"

    def wrong(self, what: str) -> ConfigError:
        return ConfigError(f"{self._name}: {_shown(self.where)}: {what}")

    def take(self, num_bytes: int) -> bytes:
        self._fill(self.at + num_bytes)
        self.at += num_bytes
        return bytes(self._buffer[self.at - num_bytes : self.at])

    def scalar(self, form: str) -> Any:
        layout = struct.Struct("<" + form)
        return layout.unpack(self.take(layout.size))[0]

    def text(self, most_bytes: int = MAX_HEAD_BYTES) -> str:
        length = self.scalar("Q")
        if length > most_bytes:
            raise self.wrong(f"a text of {length} bytes, at most {most_bytes} are possible; {_DAMAGED}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"not valid UTF-8 ({error.reason}); {_DAMAGED}") from error

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(self._form(kind))

    def _array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            return self._strings(count)
        form = np.dtype(self._form(kind)).newbyteorder("<")
        self._check_left(count, form.itemsize)
        return np.frombuffer(self.take(count * form.itemsize), form)

    def _strings(self, count: int) -> Strings:
        if count > _MAX_STRINGS:
            raise self.wrong(f"an array of {count} texts, at most {_MAX_STRINGS} are possible; {_DAMAGED}")
        self._check_left(count, 8)
        at, begin, unpack = self.at, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > len(self._buffer):
                self._fill(at + 8)
            at += 8 + unpack(self._buffer, at)[0]
        self._fill(at)
        self.at = at
        return Strings(count, bytes(self._buffer[begin:at]))

    def _form(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.wrong(f"a value of type {kind}, which is none that is read; {_DAMAGED}")
        return _SCALARS[kind]

    def _check_left(self, count: int, smallest: int) -> None:
        if count * smallest > self.size - self.at:
            raise self.wrong(f"an array of {count}, but {self.size - self.at} bytes are left; {_DAMAGED}")

    def _fill(self, end: int) -> None:
        if end > min(self.size, MAX_HEAD_BYTES):
            limit = f"the file has {self.size}" if end > self.size else f"at most {MAX_HEAD_BYTES} are read as its head"
            raise self.wrong(f"reaches to byte {end}, {limit}; {_DAMAGED}")
        while len(self._buffer) < end:
            left = self.size - len(self._buffer)
            more = self._file.read(min(max(_READ_BYTES, end - len(self._buffer)), left))
            if not more:
                raise self.wrong(f"reaches to byte {end}, the file ended before; {_DAMAGED}")
            self._buffer += more


def _shown(value: Any) -> str:
    """Return a value for an error, short and printable."""
    if isinstance(value, np.ndarray | Strings):
        return f"an array of {len(value)}"
    text = value if isinstance(value, str) else repr(value)
    return "".join(character if character.isprintable() else "?" for character in text[:80])
