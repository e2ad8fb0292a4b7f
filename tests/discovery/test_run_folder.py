from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord
from bireme.errors import ConfigError, NotFoundError
from tests.discovery.conftest import odd_entry

RECORD = WorkerRecord(worker="decode", life=2, pid=7, transfer_endpoint="ipc:///run/x", tokens_per_block=32)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("BIREME_RUN_DIR", "BIREME_KEY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_the_named_run_directory_is_made_for_its_owner_only(tmp_path, monkeypatch):
    monkeypatch.setenv("BIREME_RUN_DIR", str(tmp_path / "a" / "b"))
    assert run_folder.locate() == tmp_path / "a" / "b"
    assert mode(tmp_path / "a" / "b") == 0o700


def test_a_named_run_directory_open_to_others_is_closed(tmp_path, monkeypatch):
    monkeypatch.setenv("BIREME_RUN_DIR", str(tmp_path / "a"))
    (tmp_path / "a").mkdir(mode=0o755)
    assert mode(run_folder.locate()) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else")
def test_a_named_run_directory_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("BIREME_RUN_DIR", str(tmp_path / "a"))
    (tmp_path / "a").mkdir()
    os.chown(tmp_path / "a", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345.*set BIREME_RUN_DIR to a folder of your own"):
        run_folder.locate()


def test_the_default_run_directory_is_that_of_the_parent_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = run_folder.locate()
    assert path == tmp_path / f"bireme-{os.getuid()}" / str(os.getppid())
    assert mode(path) == mode(path.parent) == 0o700
    assert run_folder.locate() == path


def test_a_default_directory_that_a_launch_removes_as_it_ends_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    shared, made, removals = tmp_path / f"bireme-{os.getuid()}", os.mkdir, 2

    def mkdir(path, mode):
        nonlocal removals
        if Path(path).parent == shared and removals:
            removals -= 1
            os.rmdir(shared)
        made(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert run_folder.locate().is_dir() and not removals


def test_a_default_directory_open_to_others_is_closed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"bireme-{os.getuid()}").mkdir(mode=0o755)
    assert mode(run_folder.locate().parent) == 0o700


def test_a_link_in_the_place_of_the_default_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"bireme-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is no folder; remove it, or set BIREME_RUN_DIR"):
        run_folder.locate()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else")
def test_a_default_directory_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "bireme-0").mkdir(mode=0o700)
    os.chown(tmp_path / "bireme-0", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        run_folder.locate()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of somebody else")
def test_root_finds_the_workers_of_a_launch_of_another_user(tmp_path):
    run_folder.publish(tmp_path, RECORD)
    os.chown(tmp_path / "decode.json", 12345, -1)
    with pytest.raises(NotFoundError, match="it belongs to user 12345"):
        run_folder.find(tmp_path, "decode")
    os.chown(tmp_path, 12345, -1)
    assert run_folder.find(tmp_path, "decode") == RECORD


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "wrong text"])
def test_what_is_no_record_is_a_worker_that_can_t_be_found(tmp_path, kind):
    odd_entry(tmp_path / "decode.json", kind)
    with pytest.raises(NotFoundError, match="its record in the run directory can't be read"):
        run_folder.find(tmp_path, "decode")


def test_the_key_is_made_once_and_for_its_owner_only(tmp_path):
    key = run_folder.deployment_key(tmp_path)
    assert len(key) == run_folder.KEY_BYTES and run_folder.deployment_key(tmp_path) == key
    assert mode(tmp_path / "key") == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_racing_processes_agree_on_one_key(tmp_path):
    program = "import sys; from pathlib import Path; from bireme.discovery.run_folder import deployment_key as key;"
    program += "print(key(Path(sys.argv[1])).hex())"
    processes = [subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE) for _ in range(6)]
    keys = {process.communicate()[0] for process in processes}
    assert len(keys) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_the_key_of_the_environment_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", "ab" * 32)
    assert run_folder.deployment_key(tmp_path) == b"\xab" * 32
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "reason"), [("no hex", "not hexadecimal"), ("abcd", "2 bytes; 16 to 64"), ("ab" * 65, "65 bytes")]
)
def test_a_bad_key_in_the_environment_is_refused(text, reason, tmp_path, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", text)
    with pytest.raises(ConfigError, match=f"{reason}.*openssl rand -hex 32"):
        run_folder.deployment_key(tmp_path)


@pytest.mark.parametrize("size", [0, 15, 65])
def test_a_key_file_that_is_too_short_or_too_long_is_refused(size, tmp_path):
    (tmp_path / "key").write_bytes(b"k" * size)
    with pytest.raises(ConfigError, match=f"key: {size} bytes; 16 to 64: remove it"):
        run_folder.deployment_key(tmp_path)


def test_a_published_worker_is_found_until_it_is_withdrawn(tmp_path):
    run_folder.publish(tmp_path, RECORD)
    assert run_folder.find(tmp_path, "decode") == RECORD
    run_folder.withdraw(tmp_path, "decode")
    run_folder.withdraw(tmp_path, "decode")
    with pytest.raises(NotFoundError, match="worker decode is not running"):
        run_folder.find(tmp_path, "decode")


def test_a_later_life_replaces_the_record(tmp_path):
    run_folder.publish(tmp_path, RECORD)
    run_folder.publish(tmp_path, msgspec.structs.replace(RECORD, life=3))
    assert run_folder.find(tmp_path, "decode").life == 3
    assert [path.name for path in tmp_path.iterdir()] == ["decode.json"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"life": 1}'])
def test_an_unreadable_record_is_not_found(tmp_path, content):
    (tmp_path / "decode.json").write_bytes(content)
    with pytest.raises(NotFoundError, match="worker decode: its record"):
        run_folder.find(tmp_path, "decode")


def test_a_record_that_somebody_deleted_is_published_again(tmp_path):
    folder = tmp_path / "run"
    record = WorkerRecord(worker="prefill", life=7, pid=1)
    assert run_folder.restore(folder, record) and not run_folder.restore(folder, record)
    assert run_folder.find(folder, "prefill") == record
