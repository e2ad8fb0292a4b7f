"""Which processes of a folder live, and who can read what is kept there."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import subprocess
import sys

import pytest

from bireme import private_files
from bireme.config import FrontendConfig, StoredResponsesConfig
from bireme.openai.batch.batch_store import BatchStore
from bireme.openai.batch.files import FilesAndBatches
from bireme.openai.database import Lives
from bireme.openai.text.response_store import ResponseStore
from bireme.openai.video.job_store import JobStore


@pytest.fixture
def other(tmp_path):
    lives = Lives(tmp_path)
    yield lives
    lives.close()


@pytest.fixture
def own(tmp_path):
    lives = Lives(tmp_path)
    yield lives
    lives.close()


def test_a_process_lives_until_its_lock_is_free(own, other):
    assert own.has(other.own) and own.has(own.own)
    os.close(other._descriptor)
    other._descriptor = -1
    assert not own.has(other.own) and not own.has("unknown")


def test_what_dead_processes_have_left_is_swept_and_nothing_else(own, other, tmp_path):
    dead, starting = tmp_path / "processes" / "dead", tmp_path / "processes" / "starting.new"
    dead.touch()
    starting.touch()
    own.sweep()
    assert not dead.exists() and starting.exists() and own.has(other.own)


SWEPT = [
    (BatchStore, lambda store: store.sweep(3600)),
    (lambda folder: ResponseStore(folder, StoredResponsesConfig()), ResponseStore.sweep),
    (JobStore, JobStore.fail_orphans),
]


@pytest.mark.parametrize(("open_store", "sweep"), SWEPT)
def test_each_store_sweeps_them(tmp_path, open_store, sweep):
    store = open_store(tmp_path)
    (tmp_path / "processes" / "dead").touch()
    sweep(store)
    assert [path.name for path in (tmp_path / "processes").iterdir()] == [store._lives.own]
    store.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EIO])
def test_a_process_lives_while_its_file_can_t_be_opened(own, other, number, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert own.has(other.own)
    assert own.has(other.own)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR])
def test_a_process_without_a_file_is_gone(own, other, number, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert not own.has(other.own)


def modes(folder):
    paths = [folder, *folder.rglob("*")]
    return {path.name: stat.filemode(path.stat().st_mode)[1:] for path in paths}


KEPT = [
    FilesAndBatches,
    lambda folder, config: ResponseStore(folder, config.responses),
    lambda folder, _: JobStore(folder),
]


@pytest.mark.parametrize("open_store", KEPT)
@pytest.mark.parametrize("is_there", [False, True])
def test_no_other_user_reads_what_is_kept(tmp_path, open_store, is_there):
    folder = tmp_path / "kept"
    if is_there:  # as an older version has left it
        store = open_store(folder, FrontendConfig())
        for path in (folder, *folder.glob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        other = open_store(folder, FrontendConfig())
        other.close()
    else:
        store = open_store(folder, FrontendConfig())
    told = modes(folder)
    store.close()
    assert len(told) > 3 and not [name for name, mode in told.items() if mode[3:] != "------"], told


def test_a_folder_of_another_user_keeps_its_mode(monkeypatch, tmp_path):
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    private_files.make_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_who_opens_a_database_again_frees_no_lock_on_it(tmp_path):
    path = tmp_path / "own.sqlite"
    one = sqlite3.connect(path, isolation_level=None)
    one.execute("CREATE TABLE own (id)")
    one.execute("BEGIN IMMEDIATE")
    private_files.make_database(path)
    program = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
    other = subprocess.run([sys.executable, "-c", program, path], stderr=subprocess.PIPE, text=True, check=False)
    one.close()
    assert "database is locked" in other.stderr
