"""Results on disk: names, expiry, room."""

import os
import shutil
import time
from pathlib import Path

import pytest

from bireme.errors import NotFoundError, ResourceExhaustedError, UnavailableError
from bireme.video.files import FileStore


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path / "files", expiry_s=60, max_bytes=100)


def age(file, seconds):
    past = time.time() - seconds
    os.utime(file.path, (past, past))


def test_a_file_is_found_under_its_name_until_it_expires(store):
    file = store.put(b"clip", "mp4")
    assert store.find(file.name).path.read_bytes() == b"clip" and file.media_type == "video/mp4"
    age(file, 61)
    with pytest.raises(NotFoundError):
        store.find(file.name)
    assert store.sweep() == 0 and not file.path.exists()


def test_names_can_not_be_guessed_and_lead_nowhere_else(store, tmp_path):
    (tmp_path / "secret.mp4").write_text("x")
    assert store.put(b"1", "png").name != store.put(b"1", "png").name
    for name in ("../secret.mp4", "", ".", "file-1.mp4", "/etc/passwd", "file-" + "0" * 32 + ".mp4\n"):
        with pytest.raises(NotFoundError):
            store.find(name)


def test_the_oldest_files_make_room(store):
    files = [store.put(b"x" * 40, "mp4") for _ in range(2)]
    age(files[0], 30)
    store.put(b"x" * 40, "mp4")
    assert not files[0].path.exists() and files[1].path.exists()


def test_a_result_above_the_cap_is_refused(store):
    with pytest.raises(ResourceExhaustedError, match="video.max_folder_bytes is 100"):
        store.put(b"x" * 101, "mp4")


def test_half_written_files_of_a_killed_process_are_swept(store, tmp_path):
    store.check()
    draft = tmp_path / "files" / ".file-1.mp4"
    draft.write_text("x")
    os.utime(draft, (0, 0))
    store.sweep()
    assert not draft.exists()


def test_a_folder_that_can_not_be_written_is_told_and_used_once_it_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    store = FileStore(tmp_path / "file" / "below", 1, 100)
    for method in (store.check, lambda: store.put(b"clip", "mp4")):
        with pytest.raises(UnavailableError, match="File exists|Not a directory"):
            method()
    (tmp_path / "file").unlink()
    store.check()
    assert store.put(b"clip", "mp4").path.read_bytes() == b"clip"
    assert len(list((tmp_path / "file" / "below").iterdir())) == 1


def test_a_folder_that_was_removed_is_made_again(store, tmp_path):
    store.put(b"1", "mp4")
    shutil.rmtree(tmp_path / "files")
    assert store.sweep() == 0
    file = store.put(b"clip", "mp4")
    assert store.find(file.name).path.read_bytes() == b"clip"


def test_a_file_that_cannot_be_removed_keeps_its_room_and_no_other_from_going(store, monkeypatch):
    files = [store.put(b"x" * 30, "mp4") for _ in range(3)]
    for number, file in enumerate(files):
        age(file, 30 - number)
    unlink = Path.unlink

    def refuse(path, missing_ok=False):
        if path == files[0].path:
            raise PermissionError("another user's")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    store.put(b"x" * 40, "mp4")
    assert [file.path.exists() for file in files] == [True, False, True]
