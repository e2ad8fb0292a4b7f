"""Unary calls between models of one server."""

from __future__ import annotations

import pytest
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server


def texts(client, **values):
    with client.call("caller", **values) as call:
        return [text for result in call for text in result.as_numpy("text").tolist()]


def test_a_call_returns_the_tensors_of_the_other_model(client):
    assert texts(client, target="echo") == [b"ahoy,"]


def test_more_calls_than_threads_all_come_back(client):
    assert texts(client, target="echo", times=300) == [b"ahoy,"] * 300


@pytest.mark.parametrize(
    ("model", "how", "message"),
    [
        ("unary_failing", "request", "INVALID_ARGUMENT: max_tokens: -1; at least 1"),
        ("unary_failing", "lost", "UNAVAILABLE: engine lost: the engine died"),
        ("unary_failing", "value", "INTERNAL: ValueError: odd"),
        ("nowhere", "request", "nowhere"),
        ("failing", "request", "failing"),  # decoupled
    ],
)
def test_an_error_of_the_called_model_keeps_its_code(client, model, how, message):
    with pytest.raises(InferenceServerException) as caught:
        texts(client, target=model, how=how)
    print(caught.value.message())
    assert message in caught.value.message()
    assert caught.value.message().count("INVALID_ARGUMENT") <= 1
