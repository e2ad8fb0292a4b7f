"""The number of threads."""

from __future__ import annotations

import pytest

from bireme.errors import ConfigError


@pytest.fixture
def bls(triton_module):
    from bireme.triton import bls

    return bls


def test_threads_are_24_unless_the_environment_says_so(bls, monkeypatch):
    monkeypatch.delenv("BIREME_BLS_THREADS", raising=False)
    assert bls.threads_from_environment() == 24
    monkeypatch.setenv("BIREME_BLS_THREADS", "224")
    assert bls.threads_from_environment() == 224


@pytest.mark.parametrize("text", ["0", "-1", "many", "99999"])
def test_a_senseless_number_of_threads_is_refused(bls, monkeypatch, text):
    monkeypatch.setenv("BIREME_BLS_THREADS", text)
    with pytest.raises(ConfigError, match="BIREME_BLS_THREADS"):
        bls.threads_from_environment()
