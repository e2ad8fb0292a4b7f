"""What Triton makes of an error's text, parsed back; the number of threads."""

from __future__ import annotations

import pytest

from bireme.errors import BiremeError, ConfigError, NotFoundError, RequestError, UnavailableError


@pytest.fixture
def bls(triton_module):
    from bireme.triton import bls

    return bls


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("INVALID_ARGUMENT: top_p: 3", RequestError, "top_p: 3"),
        ("Failed to process the request(s): NOT_FOUND: lease 7\ngone", NotFoundError, "lease 7\ngone"),
        (
            "in ensemble 'x', UNAVAILABLE: prefill is not in recipe tiny",
            UnavailableError,
            "prefill is not in recipe tiny",
        ),
        ("Stub process 'dec_0' is not healthy.", UnavailableError, "Stub process 'dec_0' is not healthy."),
        ("Failed for execute the inference request. Model 'dec' is not ready.", UnavailableError, "Failed for execute"),
        (
            "Model prefill - Error when running inference: Server not ready",
            UnavailableError,
            "Model prefill",
        ),  # it ends
        ("something else", BiremeError, "something else"),
    ],
)
def test_an_error_keeps_its_code_through_triton(bls, message, kind, text):
    error = bls.parse_error(message)
    assert type(error) is kind
    assert str(error).startswith(text)


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
