"""The files that a batch ends with: its answers, and its errors, in the order of the input."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from bireme.openai.batch.batch_lines import BatchLine, LineReader, refused_line
from bireme.openai.batch.batch_store import StoredBatch
from bireme.openai.batch.files import FilesAndBatches

_PURPOSE = "batch_output"


@dataclass(frozen=True, slots=True)
class Results:
    """None: there was nothing to write."""

    output_file_id: str | None
    error_file_id: str | None


def write_results(own: FilesAndBatches, batch: StoredBatch, total: int, code: str, message: str) -> Results:
    """Make the files, the same ones when called again; blocks. `code` and `message` are for lines without an answer.

    Raises OSError and UnavailableError when the disk is full.
    """
    output, errors = _Part(own, batch, "output"), _Part(own, batch, "error")
    try:
        answered = own.batches.answered(batch.id)
        last = 0
        while rows := own.batches.answers_after(batch.id, last):
            for _, is_ok, line in rows:
                (output if is_ok else errors).write(line)
            last = rows[-1][0]
        if len(answered) < total:
            _refuse_others(own, batch, answered, errors, code, message)
        return Results(output.keep(), errors.keep())
    finally:
        output.close()
        errors.close()


def _refuse_others(
    own: FilesAndBatches, batch: StoredBatch, answered: set[int], errors: _Part, code: str, message: str
) -> None:
    file = own.files.find_kept(batch.input_file_id, batch.tenant)
    if file is None:  # it can't be told any more which they were
        return
    reader = LineReader(own.files.path(file), file.bytes)
    with contextlib.closing(reader):
        for data in reader:
            if reader.number not in answered:
                name = msgspec.json.decode(data, type=BatchLine).custom_id
                errors.write(refused_line(batch.id, reader.number, name, code, message))


class _Part:
    def __init__(self, own: FilesAndBatches, batch: StoredBatch, kind: str) -> None:
        self._own, self._batch, self._kind = own, batch, kind
        self._path: Path | None = None
        self._file: BinaryIO | None = None

    def write(self, line: bytes) -> None:
        if self._file is None:
            self._path = self._own.files.new_part()
            self._file = self._path.open("xb")
        self._file.write(line + b"\n")

    def keep(self) -> str | None:
        """Return the file's id: the same whenever this batch ends."""
        if self._file is None or self._path is None:
            return None
        self._file.flush()
        os.fsync(self._file.fileno())
        batch, kind = self._batch, self._kind
        name = f"file-{hashlib.sha256(f'{batch.id} {kind}'.encode()).hexdigest()[:32]}"
        max_age_s = batch.fields["max_age_s"]
        self._own.files.add(self._path, batch.tenant, _PURPOSE, f"{batch.id}_{kind}.jsonl", max_age_s, name)
        return name

    def close(self) -> None:
        if self._file is not None and self._path is not None:
            with contextlib.suppress(OSError):  # what is left in its buffer
                self._file.close()
            self._path.unlink(missing_ok=True)
