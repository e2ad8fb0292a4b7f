"""Requests that were in a stalled engine are let into the next one after the other."""

from __future__ import annotations

import pytest

from bireme.engines.base import PlainTokens, StepOutput
from bireme.engines.child.trials import Trials
from bireme.messages import Finish, Usage
from bireme.own_work import OwnWork

KEYS = [(1, 1), (1, 2), (2, 1)]


@pytest.fixture
def started():
    return []


@pytest.fixture
def trials(started):
    """Trials of KEYS, the first of which has begun."""
    trials = Trials(OwnWork())
    for key in KEYS:
        trials.add(key, lambda key=key: started.append(key) or True)
    return trials


def test_the_next_begins_when_the_one_before_has_come_past_the_place(trials, started):
    assert started == KEYS[:1]
    trials.see([StepOutput(KEYS[0], [7])], None)
    assert started == KEYS[:1]
    trials.see([], PlainTokens([(9, 9), KEYS[0]], [1, 2]))
    assert started == KEYS[:2] and trials.tried == KEYS[1]


def test_tokens_of_others_say_nothing(trials, started):
    trials.see([StepOutput(KEYS[1], [7, 8])], PlainTokens([(9, 9)] * 3, [1, 2, 3]))
    assert started == KEYS[:1]


def test_the_next_begins_at_the_others_end(trials, started):
    trials.see([StepOutput(KEYS[0], finish=Finish("cancelled", Usage()))], None)
    assert started == KEYS[:2]


def test_one_that_is_aborted_while_it_waits_never_begins(trials, started):
    assert trials.remove(KEYS[1]) and not trials.remove(KEYS[1]) and not trials.remove(KEYS[0])
    trials.see([StepOutput(KEYS[0], [7, 8])], None)
    assert started == [KEYS[0], KEYS[2]]


def test_one_that_the_engine_refuses_makes_room(started):
    trials = Trials(OwnWork())
    trials.add(KEYS[0], lambda: False)
    assert trials.tried is None
    trials.add(KEYS[1], lambda: started.append(KEYS[1]) or True)
    assert started == [KEYS[1]]
