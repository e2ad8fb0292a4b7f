"""KV blocks on disk: one file without a name, which ends with its process, however that ends.

No other process, and no later life of this one, can take its blocks for its own. What was written is read back only if
its checksum, which is kept in memory, is right: a torn write, a truncated file or a flipped bit is a block not found.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import xxhash

from bireme.errors import ConfigError

logger = logging.getLogger("bireme.kv.disk")
_PREFIX = "bireme-kv-"


class DiskBlocks:
    """Blocks 1..num_blocks of each group, at fixed places. One thread writes, one reads; never the same block."""

    def __init__(self, folder: str, num_blocks: Sequence[int], block_bytes: Sequence[int]) -> None:
        """Raises ConfigError for a folder that can't be written."""
        self._block_bytes = tuple(block_bytes)
        sizes = [count * size for count, size in zip(num_blocks, block_bytes, strict=True)]
        self._begins = [sum(sizes[:group]) for group in range(len(sizes))]
        self._sums: dict[tuple[int, int], bytes] = {}
        try:
            self._file = _open_nameless(Path(folder))
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise ConfigError(
                f"kv_cache_config.disk_cache_path: {folder}: {error.strerror}; make a folder that this user may write"
            ) from error
        if free < sum(sizes):
            logger.warning(
                "kv_disk event=small folder=%s free_mib=%d disk_cache_size_mib=%d: what finds no room is not kept",
                folder,
                free >> 20,
                sum(sizes) >> 20,
            )

    def write(self, group: int, block: int, data: memoryview) -> bool:
        """Return whether it is on disk: a full disk, or one that fails, takes nothing."""
        self._sums.pop((group, block), None)
        at, left = self._place(group, block), data
        try:
            while left.nbytes:
                written = os.pwrite(self._file, left, at)
                if not written:
                    return False
                at, left = at + written, left[written:]
        except OSError as error:
            logger.warning("kv_disk event=write_failed error=%s: blocks are not kept on disk for a while", error)
            return False
        self._sums[group, block] = xxhash.xxh3_128_digest(data)
        return True

    def read(self, group: int, block: int, target: memoryview) -> bool:
        """Fill `target`. Return whether it holds what was written."""
        at, left = self._place(group, block), target
        try:
            while left.nbytes:
                count = os.preadv(self._file, [left], at)
                if not count:
                    break
                at, left = at + count, left[count:]
        except OSError as error:
            logger.warning("kv_disk event=read_failed block=%d error=%s: it is computed again", block, error)
            return False
        if left.nbytes or xxhash.xxh3_128_digest(target) != self._sums.get((group, block)):
            logger.warning("kv_disk event=damaged block=%d: it is computed again", block)
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _place(self, group: int, block: int) -> int:
        return self._begins[group] + (block - 1) * self._block_bytes[group]


def _open_nameless(folder: Path) -> int:
    """Return a file of mode 0600 that nobody else can open; where it must have a name, it loses that at once."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise
        logger.info("kv_disk event=named_file folder=%s reason=%s", folder, error.strerror)
    for leftover in folder.glob(f"{_PREFIX}*"):  # of a process that ended between the two calls below
        with contextlib.suppress(OSError):
            leftover.unlink()
    file, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    return file
