"""What tells a canary from a client's request."""

import time

import pytest

from bireme.canary_mark import is_canary, new_mark

KEY = "ab" * 32


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("BIREME_KEY", KEY)


def test_a_mark_of_the_deployment_s_key_is_a_canary_s_whatever_its_case():
    assert is_canary(new_mark(KEY)) and is_canary(new_mark(KEY.upper())) and new_mark(KEY) != new_mark(KEY)


@pytest.mark.parametrize("salt", ["", "canary.", "canary.ab", "canary-ab", "canary.ab." + "0" * 64, "canary.é"])
def test_what_a_client_makes_up_is_no_canary(salt):
    assert not is_canary(salt)


def test_a_mark_is_no_canary_s_of_another_deployment_or_in_a_key_s_own_salt(monkeypatch):
    mark = new_mark(KEY)
    assert not is_canary(f"tenant.{mark}") and not is_canary(new_mark("cd"))
    monkeypatch.delenv("BIREME_KEY")
    assert not is_canary(mark) and not is_canary(new_mark(""))


def test_a_mark_of_minutes_ago_or_of_a_clock_that_is_far_off_is_no_canary_s(monkeypatch):
    mark, now = new_mark(KEY), time.time()
    for passed_s, is_one in ((60, True), (600, False), (-60, True), (-600, False), (0, True)):
        monkeypatch.setattr(time, "time", lambda at=now + passed_s: at)
        assert is_canary(mark) == is_one
