"""Files that are used again: by whom they may be, and how much memory they take."""

from __future__ import annotations

import os

import pytest

from bireme.errors import ResourceExhaustedError
from bireme.kv.transfer import file_pool
from bireme.kv.transfer.file_pool import FilePool
from bireme.kv.transfer.shm import OpenedFiles
from bireme.kv.transfer.shm_file import SHM_DIR, SharedFile, file_prefix
from tests.kv.transfer.kv_side import all_files_of, files_of, wait_until

LIMIT = 1 << 20


@pytest.fixture
def pool(tmp_path):
    pool = FilePool(f"{file_prefix(tmp_path, 'prefill')}1-")
    pool.limit_bytes = LIMIT
    yield pool
    pool.close()
    assert not all_files_of(tmp_path, "prefill")


def inode(file):
    return (SHM_DIR / file.name).stat().st_ino


def sizes(tmp_path):
    return sorted((SHM_DIR / name).stat().st_size for name in all_files_of(tmp_path, "prefill"))


def test_a_file_that_was_read_is_used_again_under_another_name(pool):
    first = pool.take(1000)
    name, number = first.name, inode(first)
    pool.give(first, is_read=True)
    again = pool.take(500)
    assert inode(again) == number and again.name != name and not (SHM_DIR / name).exists()
    pool.give(again, is_read=False)


def test_a_file_that_may_still_be_read_stays_what_it_is(pool):
    first = pool.take(1000)
    os.pwrite(first._descriptor, b"a" * 1000, 0)
    reader = SharedFile.open(first.name, 1000)
    pool.give(first, is_read=False)
    second = pool.take(1000)
    os.pwrite(second._descriptor, b"b" * 1000, 0)
    assert os.pread(reader._descriptor, 1000, 0) == b"a" * 1000
    reader.close()
    pool.give(second, is_read=False)


def test_the_smallest_that_is_large_enough_is_taken_and_else_the_largest_grows(pool, tmp_path):
    files = [pool.take(size) for size in (1000, 3000, 2000)]
    for file in files:
        pool.give(file, is_read=True)
    assert pool.take(1500) is files[2] and pool.take(4000) is files[1]
    assert sizes(tmp_path) == [1000, 2000, 4000]
    for file in files[1:]:
        pool.give(file, is_read=False)


def test_all_files_together_are_no_larger_than_the_limit(pool, tmp_path):
    small, large = pool.take(LIMIT // 4), pool.take(LIMIT // 2)
    pool.give(large, is_read=True)
    pool.give(small, is_read=True)
    held = [pool.take(10), pool.take(LIMIT // 4 + 1)]  # the small file, and the large one for half its size
    held.append(pool.take(LIMIT // 2))
    assert sum(sizes(tmp_path)) <= LIMIT and len(files_of(tmp_path, "prefill")) == 3
    for file in held:
        pool.give(file, is_read=True)
    assert sum(sizes(tmp_path)) <= LIMIT


def test_a_transfer_larger_than_the_limit_leaves_no_file(pool, tmp_path):
    pool.give(pool.take(2 * LIMIT), is_read=True)
    assert not all_files_of(tmp_path, "prefill")


def test_files_that_nobody_uses_are_removed_in_time(pool, tmp_path, monkeypatch):
    pool.give(pool.take(1000), is_read=True)
    pool.tidy()
    assert sizes(tmp_path) == [1000]
    monkeypatch.setattr(file_pool, "KEEP_S", 0.0)
    wait_until(lambda: pool.tidy() or not all_files_of(tmp_path, "prefill"))


def test_kept_files_make_room_when_there_is_none(pool, tmp_path, monkeypatch):
    kept, fallocate = [pool.take(1000), pool.take(2000)], os.posix_fallocate
    for file in kept:
        pool.give(file, is_read=True)

    def full(descriptor, offset, num_bytes):
        if len(all_files_of(tmp_path, "prefill")) > 1:
            raise OSError(28, "No space left on device")
        fallocate(descriptor, offset, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    file = pool.take(3000)
    assert sizes(tmp_path) == [3000]
    with pytest.raises(ResourceExhaustedError, match="no room for 10 bytes"):
        pool.take(10)
    pool.give(file, is_read=True)


def test_a_kept_file_that_somebody_removed_is_made_again(pool, tmp_path):
    pool.give(pool.take(1000), is_read=True)
    (SHM_DIR / all_files_of(tmp_path, "prefill")[0]).unlink()
    pool.give(pool.take(1000), is_read=True)
    assert sizes(tmp_path) == [1000]


def test_a_file_that_was_read_stays_mapped_until_it_has_no_name(pool):
    opened, first = OpenedFiles(), pool.take(1000)
    reader = opened.take(first.name, 1000)
    opened.give(reader)
    pool.give(first, is_read=True)
    again = pool.take(2000)
    assert opened.take(again.name, 2000) is reader and reader.num_bytes == 2000
    opened.give(reader)
    opened.tidy()
    assert reader.is_open
    pool.give(again, is_read=False)
    opened.tidy()
    assert not reader.is_open


def test_few_files_are_kept(pool, tmp_path):
    for file in [pool.take(10) for _ in range(file_pool.MOST_SPARE + 3)]:
        pool.give(file, is_read=True)
    assert len(all_files_of(tmp_path, "prefill")) == file_pool.MOST_SPARE
