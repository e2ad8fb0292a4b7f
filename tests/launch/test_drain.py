"""tools/drain.py: which launch and which worker it means."""

import pytest

from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord
from bireme.launch.run_folder import RunFolder
from tools import drain


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Return a function that makes a launch's run folder with a worker in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = []

    def make():
        made.append(RunFolder())
        run_folder.publish(made[-1].path, WorkerRecord(worker="decode_1"))
        return made[-1].path

    yield make
    for folder in made:
        folder.remove()


def test_the_only_launch_is_meant(launch, capsys):
    folder = launch()
    assert drain.main(["decode_1"]) == 0 and run_folder.is_draining(folder, "decode_1")
    assert "decode_1 drains" in capsys.readouterr().out
    assert drain.main(["decode_1", "--undo"]) == 0 and not run_folder.is_draining(folder, "decode_1")


def test_of_several_launches_one_must_be_named(launch, capsys):
    first, second = launch(), launch()
    assert drain.main(["decode_1"]) == drain.WRONG
    assert str(first) in capsys.readouterr().err
    assert drain.main(["decode_1", "--run-folder", str(second)]) == 0
    assert run_folder.is_draining(second, "decode_1") and not run_folder.is_draining(first, "decode_1")


def test_a_worker_that_is_not_there_is_named(launch, capsys):
    launch()
    assert drain.main(["decode_7"]) == drain.WRONG
    assert "worker decode_7 is not running" in capsys.readouterr().err


def test_a_drained_worker_whose_server_is_started_again_stays_drained_until_that_is_undone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = RunFolder()
    run_folder.publish(folder.path, WorkerRecord(worker="decode_1"))
    drain.main(["decode_1"])
    folder.clear()
    assert run_folder.is_draining(folder.path, "decode_1")
    run_folder.publish(folder.path, WorkerRecord(worker="decode_1", state="draining"))  # its next engine's
    assert drain.main(["decode_1", "--undo"]) == 0 and not run_folder.is_draining(folder.path, "decode_1")
    folder.remove()
