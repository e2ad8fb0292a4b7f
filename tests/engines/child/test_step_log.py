"""The log of step times."""

from array import array

import pytest

from bireme.engines.child.step_log import VARIABLE, StepLog


def read(path):
    steps = array("f")
    steps.frombytes(path.read_bytes())
    return [pytest.approx(step) for step in steps]


def test_a_step_that_follows_at_once_counts_from_the_end_of_the_last(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "steps"))
    log = StepLog()
    log.add(10.0, 11.0, is_first=True)
    log.add(11.5, 12.0, is_first=False)
    log.add(20.0, 20.25, is_first=True)
    log.close()
    assert [1.0, 1.0, 0.25] == read(tmp_path / "steps")


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    log = StepLog()
    log.add(1.0, 2.0, is_first=True)
    log.close()
    assert list(tmp_path.iterdir()) == []
