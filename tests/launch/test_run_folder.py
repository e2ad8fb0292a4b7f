"""The run folder: private, locked while in use, swept when its owner was killed."""

import stat
import subprocess
import sys

import pytest

from bireme.errors import ConfigError
from bireme.launch.run_folder import SHM, RunFolder, sweep_stale

KILLED_OWNER = """
import os, pathlib, signal, sys
from bireme.launch.run_folder import RunFolder
run = RunFolder(pathlib.Path(sys.argv[1]))
pathlib.Path("/dev/shm", run.shm_prefix + "left").touch()
print(run.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_folder_is_private(tmp_path):
    run = RunFolder(tmp_path / "base")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.path.parent.stat().st_mode) == 0o700
    run.remove()


def test_removing_takes_shared_memory_along(tmp_path):
    run = RunFolder(tmp_path / "base")
    (SHM / f"{run.shm_prefix}region").touch()
    run.remove()
    assert not list(SHM.glob(f"{run.shm_prefix}*")) and not run.path.exists()


def test_clearing_keeps_the_folder_and_its_lock(tmp_path):
    run = RunFolder(tmp_path / "base")
    (run.path / "models").mkdir()
    (run.path / "key").touch()
    run.clear()
    assert [path.name for path in run.path.iterdir()] == ["lock"]
    assert sweep_stale(run.path.parent) == []
    run.remove()


def test_what_a_killed_owner_left_is_swept_by_the_next_launch(tmp_path):
    base = tmp_path / "base"
    killed = subprocess.run([sys.executable, "-c", KILLED_OWNER, base], capture_output=True, text=True, timeout=60)
    left = killed.stdout.strip()
    run = RunFolder(base)
    assert not list(SHM.glob(f"bireme_{left.rpartition('/')[2]}_*"))
    assert [path for path in base.iterdir() if path.is_dir()] == [run.path]
    run.remove()


def test_a_folder_in_use_is_not_swept(tmp_path):
    first, second = RunFolder(tmp_path / "base"), RunFolder(tmp_path / "base")
    assert first.path.exists()
    first.remove()
    second.remove()
    assert not (tmp_path / "base").exists()


def test_a_base_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "base").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is no folder"):
        RunFolder(tmp_path / "base")
