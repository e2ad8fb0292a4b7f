"""A generation that takes all requests from its first moment is warned of, once; one that grows into it is not."""

import io

import pytest

from bireme.discovery.records import WorkerRecord
from bireme.launch.console import Console
from bireme.launch.generation_watch import GenerationWatch


def view(**weights):
    """Return that of one worker a generation."""
    numbers = {int(name.removeprefix("of_")): weight for name, weight in weights.items()}
    return {
        f"decode@{number}": WorkerRecord(worker="decode", generation=number, weight=weight)
        for number, weight in numbers.items()
    }


@pytest.fixture
def log():
    return io.StringIO()


@pytest.fixture
def watch(log):
    return GenerationWatch(1, Console("info", stream=log))


@pytest.mark.parametrize("alone", [{"of_1": 1.0}, {"of_2": 1.0}])  # as the older launch sees it, and as the newer one
def test_one_that_joins_with_weight_1_is_warned_of_once_with_the_way_back(watch, log, alone):
    for seen in (view(**alone), view(of_1=1.0, of_2=1.0), view(**alone), view(of_1=1.0, of_2=1.0)):
        watch.take(seen)
    (line,) = log.getvalue().splitlines()
    assert "generation_takes_all generation=2 idle=1" in line and "--weight 0 at its admin door" in line
    assert list(watch.shares.items()) == [(2, 1.0), (1, 0.0)]


def test_one_whose_weight_grows_is_not(watch, log):
    for weight in (0.0, 0.5, 1.0):
        watch.take(view(of_1=1.0, of_2=weight))
    assert log.getvalue() == "" and watch.shares == {2: 1.0, 1: 0.0}


def test_one_that_is_alone_or_drains_is_not(watch, log):
    assert watch.shares == {1: 1.0}
    watch.take({"decode": WorkerRecord(worker="decode", generation=2, state="draining")})
    assert watch.shares == {}
    watch.take(view(of_2=1.0))
    assert log.getvalue() == "" and watch.shares == {2: 1.0}
