from __future__ import annotations

import pytest

from bireme import errors
from bireme.errors import (
    BiremeError,
    EngineLostError,
    EngineStalledError,
    KvTransferError,
    NotFoundError,
    RequestError,
    UnavailableError,
    from_message,
    one_line,
    parse_error,
    to_message,
)


def tree(kind=BiremeError):
    return [kind, *(inner for child in kind.__subclasses__() for inner in tree(child))]


KINDS = [kind for kind in tree() if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives_the_wire(kind):
    error = from_message(to_message(kind("3 tokens; the limit is 2: send fewer")))
    assert type(error) is kind
    assert str(error) == "3 tokens; the limit is 2: send fewer"


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_starts_with_the_code_of_its_error(kind):
    assert to_message(kind("x")).startswith(f"{kind.code}: ")


def test_the_module_docstring_names_every_error_with_its_code():
    for kind in KINDS:
        line = next(line for line in errors.__doc__.splitlines() if kind.__name__ in line)
        assert kind in (EngineLostError, EngineStalledError, KvTransferError) or f" {kind.code}" in line


def test_a_foreign_exception_is_internal_and_keeps_its_type():
    assert to_message(ValueError("odd")) == "INTERNAL: ValueError: odd"
    assert type(from_message("INTERNAL: ValueError: odd")) is BiremeError


@pytest.mark.parametrize("text", ["no code at all", "TEAPOT: short and stout", "UNAVAILABLE", ""])
def test_text_without_a_known_code_is_kept_whole(text):
    error = from_message(text)
    assert type(error) is BiremeError and str(error) == text


def test_text_may_hold_colons_and_lines():
    assert str(from_message("NOT_FOUND: a: b\nc")) == "a: b\nc"


def test_only_full_and_unavailable_are_retryable():
    assert {kind.code for kind in KINDS if kind.retryable} == {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
    assert issubclass(EngineLostError, UnavailableError)


def test_the_reason_of_a_foreign_error_may_stand_after_its_first_line():
    error = ValueError("Validation error for 'validate_architecture':\n    ValueError: 65 is not 4 * n\n")
    assert one_line(error) == "Validation error for 'validate_architecture': ValueError: 65 is not 4 * n"
    assert one_line(ValueError()) == "ValueError"


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
        ("Request for unknown model: 'x' is not found", UnavailableError, "Request for unknown model"),
        ("something else", BiremeError, "something else"),
    ],
)
def test_an_error_keeps_its_code_through_triton(message, kind, text):
    error = parse_error(message)
    assert type(error) is kind
    assert str(error).startswith(text)
