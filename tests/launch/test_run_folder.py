"""The run folder: private, locked while in use, swept when its owner was killed."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bireme.discovery import live_settings
from bireme.discovery.live_settings import LiveSettings
from bireme.discovery.pulse import PulseReader, own_pulse, pulse_path
from bireme.discovery.run_folder import ask_drain, ask_sleep
from bireme.errors import ConfigError
from bireme.launch import processes
from bireme.launch.run_folder import SHM, RunFolder, sweep_stale

KILLED_OWNER = """
import os, pathlib, signal, sys
from bireme.launch.run_folder import RunFolder
run_folder = RunFolder(pathlib.Path(sys.argv[1]))
pathlib.Path("/dev/shm", run_folder.shm_prefix + "left").touch()
print(run_folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


COMES_AND_GOES = """
import pathlib, sys
from bireme.launch.run_folder import RunFolder
for _ in range(40):
    run_folder = RunFolder(pathlib.Path(sys.argv[1]))
    assert (run_folder.path / "lock").is_file()
    run_folder.remove()
"""


def test_launches_that_come_and_go_at_once_do_not_disturb_each_other(tmp_path):
    """The last one to go removes the base, just when another one comes."""
    command = [sys.executable, "-c", COMES_AND_GOES, tmp_path / "base"]
    launches = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [launch.communicate()[1] for launch in launches] == [""] * 3


def test_a_folder_that_two_threads_remove_at_once_is_removed_once(tmp_path):
    """A second stop signal ends a launch while the first one does."""
    for _ in range(20):
        run_folder = RunFolder(tmp_path / "base")
        with ThreadPoolExecutor(2) as pool:
            for removed in [pool.submit(run_folder.remove) for _ in range(2)]:
                removed.result()
        assert not run_folder.path.exists()


def test_a_base_that_is_removed_while_it_is_looked_at_is_made_again(tmp_path, monkeypatch):
    base, made = tmp_path / "base", os.mkdir
    base.mkdir()

    def mkdir(path, mode):
        try:
            made(path, mode)
        except FileExistsError:
            os.rmdir(path)  # as another launch does that ends
            raise

    monkeypatch.setattr(os, "mkdir", mkdir)
    run_folder = RunFolder(base)
    assert run_folder.path.is_dir() and run_folder.path.parent == base
    run_folder.remove()


def test_a_base_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "base").touch()
    with pytest.raises(ConfigError, match="is no folder"):
        RunFolder(tmp_path / "base")


def test_a_run_folder_is_private(tmp_path):
    run_folder = RunFolder(tmp_path / "base")
    assert stat.S_IMODE(run_folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run_folder.path.parent.stat().st_mode) == 0o700
    run_folder.remove()


def test_removing_takes_shared_memory_along(tmp_path):
    run_folder = RunFolder(tmp_path / "base")
    (SHM / f"{run_folder.shm_prefix}region").touch()
    run_folder.remove()
    assert not list(SHM.glob(f"{run_folder.shm_prefix}*")) and not run_folder.path.exists()


def test_clearing_keeps_the_folder_and_its_lock(tmp_path):
    run_folder = RunFolder(tmp_path / "base")
    (run_folder.path / "models").mkdir()
    (run_folder.path / "key").touch()
    run_folder.clear()
    assert [path.name for path in run_folder.path.iterdir()] == ["lock"]
    assert sweep_stale(run_folder.path.parent) == []
    run_folder.remove()


def test_a_process_that_outlives_a_server_keeps_its_pulse_to_the_end_of_the_launch(tmp_path, monkeypatch):
    run_folder = RunFolder(tmp_path / "base")
    monkeypatch.setenv("BIREME_SHM_PREFIX", run_folder.shm_prefix)
    pulse, left = own_pulse(), pulse_path(run_folder.shm_prefix, os.getppid())
    reader = PulseReader.open(run_folder.shm_prefix, os.getpid())
    left.touch()  # of a process of the former server; another one has its pid now
    assert run_folder.sweep_shared_memory() == [left.name]
    run_folder.clear()
    pulse.beat()
    assert reader.count() == 2
    run_folder.remove()
    assert reader.count() is None
    reader.close()


def test_clearing_keeps_what_an_operator_has_asked_for(tmp_path):
    run_folder = RunFolder(tmp_path / "base")
    ask_drain(run_folder.path)
    ask_drain(run_folder.path, "decode_1")
    ask_sleep(run_folder.path, "prefill")
    live_settings.write(run_folder.path, LiveSettings(log_level="debug"))
    run_folder.clear()
    kept = ["decode_1.drain", "drain", "live.json", "lock", "prefill.sleep"]
    assert sorted(path.name for path in run_folder.path.iterdir()) == kept
    run_folder.remove()


def test_responses_of_the_frontend_outlive_a_server(tmp_path):
    run_folder = RunFolder(tmp_path / "base")
    (run_folder.path / "responses").mkdir()
    run_folder.clear()
    assert sorted(path.name for path in run_folder.path.iterdir()) == ["lock", "responses"]
    run_folder.remove()
    assert not run_folder.path.exists()


def test_what_a_killed_owner_left_is_swept_by_the_next_launch(tmp_path):
    base = tmp_path / "base"
    killed = subprocess.run([sys.executable, "-c", KILLED_OWNER, base], capture_output=True, text=True, timeout=60)
    left = killed.stdout.strip()
    run_folder = RunFolder(base)
    assert not list(SHM.glob(f"bireme_{left.rpartition('/')[2]}_*"))
    assert [path for path in base.iterdir() if path.is_dir()] == [run_folder.path]
    run_folder.remove()


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


def test_what_somebody_deletes_is_there_again_and_locked(tmp_path):
    run_folder = RunFolder(tmp_path / "base")
    (run_folder.path / "models" / "decode").mkdir(parents=True)
    (run_folder.path / "models" / "decode" / "1").symlink_to("/elsewhere")
    (run_folder.path / "models" / "decode" / "config.pbtxt").write_text("backend")
    run_folder.remember()
    assert run_folder.restore() == 0
    shutil.rmtree(run_folder.path.parent)
    assert run_folder.restore() == 3 and stat.S_IMODE(run_folder.path.stat().st_mode) == 0o700
    assert (run_folder.path / "models" / "decode" / "1").readlink() == Path("/elsewhere")
    assert (run_folder.path / "models" / "decode" / "config.pbtxt").read_text() == "backend"
    assert sweep_stale(run_folder.path.parent) == []
    run_folder.remove()


def test_a_deleted_folder_is_cleared_for_the_next_server_all_the_same(tmp_path):
    run_folder = RunFolder(tmp_path / "base")
    (run_folder.path / "recipe" / "mine").mkdir(parents=True)
    (run_folder.path / "recipe" / "mine" / "recipe.yaml").write_text("{}")
    (run_folder.path / "models").mkdir()
    (run_folder.path / "models" / "file").touch()
    run_folder.remember()
    shutil.rmtree(run_folder.path)
    run_folder.clear()
    assert sorted(path.name for path in run_folder.path.iterdir()) == ["lock", "recipe"]
    assert (run_folder.path / "recipe" / "mine" / "recipe.yaml").read_text() == "{}"
    run_folder.remove()


def test_a_process_of_the_launch_that_was_stopped_does_not_survive_it(tmp_path):
    run_folder = RunFolder(tmp_path / "base")
    environment = os.environ | {"BIREME_SHM_PREFIX": run_folder.shm_prefix}
    stopped = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        while not processes.environment(stopped.pid):  # Popen returns a moment before the kernel has it in place
            time.sleep(0.001)
        stopped.send_signal(signal.SIGSTOP)
        run_folder.remove()
        assert stopped.wait(20) == -signal.SIGKILL
    finally:
        stopped.kill()
        stopped.wait()


def test_cleaners_that_ask_for_a_lock_or_go_by_age_leave_the_folder_alone(tmp_path):
    run_folder = RunFolder(tmp_path / "base")
    (run_folder.path / "decode.json").touch()
    os.utime(run_folder.path / "decode.json", (1.0, 1.0))
    run_folder.touch()
    assert (run_folder.path / "decode.json").stat().st_mtime > 1.0
    asked = subprocess.run(["flock", "--nonblock", "--exclusive", run_folder.path, "true"])  # as systemd-tmpfiles asks
    assert asked.returncode == 1
    run_folder.remove()
