"""Bounded files of lines: names, rotation, what a full or a damaged disk leaves of them."""

import gzip
import os
import stat
import subprocess
import sys

import pytest

from bireme.config import CHECKOUT
from bireme.errors import ConfigError
from bireme.observability.rotated_files import RotatedFiles, check_writable

LINE = b"x" * 99 + b"\n"


@pytest.fixture
def opened(tmp_path):
    """Open files below `log`; all are closed at the end."""
    found = []

    def opened(max_bytes=1000, max_files=3, name="generate"):
        found.append(RotatedFiles(tmp_path / "log", name, max_bytes, max_files))
        return found[-1]

    yield opened
    for files in found:
        files.close()


def contents(folder):
    """Return name -> bytes, of compressed ones as they were."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {name: gzip.decompress(data) if name.endswith(".gz") else data for name, data in found.items()}


def test_a_full_file_is_set_aside_compressed_and_the_oldest_goes(tmp_path, opened):
    files = opened()
    for number in range(50):
        files.write(b"%04d" % number + LINE[4:])
    while files.pack_on():
        pass
    found = contents(tmp_path)
    assert sorted(found) == [*(f"log.generate.00000{number}.jsonl.gz" for number in (2, 3, 4)), "log.generate.jsonl"]
    kept = b"".join(found[name] for name in sorted(found)).splitlines()
    assert [int(line[:4]) for line in kept] == list(range(10, 50))
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_process_that_comes_later_sets_aside_what_was_left(tmp_path, opened):
    (tmp_path / "log.generate.jsonl").write_bytes(LINE + b"cut short")
    (tmp_path / "log.generate.000007.jsonl.gz.part").write_bytes(b"half")
    files = opened()
    files.write(LINE)
    files.close()
    assert contents(tmp_path) == {"log.generate.000001.jsonl.gz": LINE + b"cut short", "log.generate.jsonl": LINE}


def test_processes_of_one_name_have_files_of_their_own(tmp_path, opened):
    for files in (opened(), opened(), opened(name="chat")):
        files.write(LINE)
    assert sorted(contents(tmp_path)) == ["log.chat.jsonl", "log.generate-2.jsonl", "log.generate.jsonl"]


def test_a_file_that_somebody_removed_is_made_again(tmp_path, opened):
    files = opened()
    files.write(LINE)
    (tmp_path / "log.generate.jsonl").unlink()
    files.write(LINE)
    assert contents(tmp_path) == {"log.generate.jsonl": LINE}


def test_others_lose_a_file_that_they_could_read(tmp_path, opened):
    (tmp_path / "log.generate.jsonl").touch(0o644)
    opened().write(LINE)
    assert stat.S_IMODE((tmp_path / "log.generate.jsonl").stat().st_mode) == 0o600


def test_a_link_is_not_followed(tmp_path, opened):
    (tmp_path / "log.generate.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        opened().write(LINE)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("path", ["/nowhere/log", "/proc/log", "/dev/null/log"])
def test_a_path_that_can_t_be_written_is_refused_by_its_key(path):
    for attempt in (lambda: check_writable(CHECKOUT / path), lambda: RotatedFiles(CHECKOUT / path, "chat", 1000, 3)):
        with pytest.raises(ConfigError, match=rf"observability\.request_log\.path: {path}: can't be written: "):
            attempt()


def test_the_check_leaves_nothing(tmp_path):
    check_writable(tmp_path / "log")
    assert os.listdir(tmp_path) == []


FULL_DISK = """
import resource, sys
from pathlib import Path
from bireme.observability.rotated_files import RotatedFiles
files, line = RotatedFiles(Path(sys.argv[1]), "generate", 10_000, 3), b"x" * 99 + b"\\n"
files.write(line)
resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))  # a file can't grow beyond
errors = 0
for lines in (line * 2, line, line):  # a part of the first fits
    try:
        files.write(lines)
    except OSError as error:
        errors += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
files.write(line)
print(errors)
"""


def test_a_full_disk_cuts_no_line_and_is_written_again_when_it_has_room(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "log")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT)
    assert result.stdout == "2\n"
    assert contents(tmp_path) == {"log.generate.jsonl": 3 * LINE}
