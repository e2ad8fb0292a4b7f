"""tools/sleep.py: what it asks of a launch's worker, and how it answers for one that is not there."""

import pytest

from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord
from bireme.launch.run_folder import RunFolder
from tools import sleep


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = RunFolder()
    run_folder.publish(made.path, WorkerRecord(worker="decode"))
    yield made
    made.remove()


def test_a_worker_is_asked_to_sleep_and_woken(folder, capsys):
    assert sleep.main(["decode"]) == 0
    assert run_folder.must_sleep(folder.path, "decode") and not run_folder.must_free_weights(folder.path, "decode")
    assert run_folder.is_draining(folder.path, "decode") and not run_folder.is_draining(folder.path, "prefill")
    assert "decode goes to sleep" in capsys.readouterr().out
    assert sleep.main(["decode", "--wake"]) == 0 and not run_folder.must_sleep(folder.path, "decode")


def test_its_weights_can_be_freed_too(folder):
    assert sleep.main(["decode", "--free-weights"]) == 0
    assert run_folder.must_free_weights(folder.path, "decode")


def test_weights_of_a_worker_that_sleeps_already_can_be_freed(folder):
    assert sleep.main(["decode"]) == 0
    run_folder.withdraw(folder.path, "decode")  # its engine has ended
    assert sleep.main(["decode", "--free-weights"]) == 0
    assert run_folder.must_free_weights(folder.path, "decode")
    assert sleep.main(["decode"]) == 0 and run_folder.must_free_weights(folder.path, "decode")


def test_a_worker_that_is_not_there_or_does_not_sleep_is_named(folder, capsys):
    assert sleep.main(["decode_7"]) == sleep.WRONG
    assert "worker decode_7 is not running" in capsys.readouterr().err
    assert sleep.main(["decode", "--wake"]) == sleep.WRONG
    assert "decode does not sleep" in capsys.readouterr().err


def test_a_worker_sleeps_on_when_its_server_is_started_again(folder):
    sleep.main(["decode"])
    folder.clear()
    assert run_folder.must_sleep(folder.path, "decode")
