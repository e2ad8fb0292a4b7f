import importlib.metadata

import pytest

from bireme.errors import ConfigError, RequestError
from bireme.logits import registry
from bireme.logits.base import ProcessorContext
from bireme.messages import ProcessorCall

CONTEXT = ProcessorContext("r1", 10, 0)


class Nothing:
    """A processor as a user would write it, in the form of Dynamo's protocol."""

    def __init__(self, context, strength=1.0):
        if strength < 0:
            raise ValueError("strength must not be negative")
        self.context, self.strength = context, strength

    def __call__(self, token_ids, logits):
        return None


@pytest.fixture
def registered():
    registry.register("nothing", Nothing)
    yield
    registry.unregister("nothing")


def create(name, **args):
    return registry.create([ProcessorCall(name, args)], CONTEXT)[0]


def test_processors_that_do_not_read_the_tokens_say_so(registered):
    assert [name for name in registry.known() if not registry.reads_token_ids(name)] == [
        "allowed_tokens", "logit_bias", "min_p", "temperature", "top_k", "top_p",
    ]  # fmt: skip
    assert registry.reads_token_ids("nothing")


def test_a_registered_processor_gets_context_and_arguments(registered):
    made = create("nothing", strength=2.0)
    assert made.context.request_id == "r1" and made.strength == 2.0
    assert "nothing" in registry.known()


def test_what_its_factory_refuses_is_a_request_error(registered):
    with pytest.raises(RequestError, match="nothing: strength must not be negative"):
        create("nothing", strength=-1)


def test_a_name_can_not_be_taken_twice(registered):
    for name in ("nothing", "temperature"):
        with pytest.raises(ConfigError, match="exists already"):
            registry.register(name, Nothing)


@pytest.fixture
def installed(monkeypatch):
    """Entry points as an installed package would bring them."""
    points = [
        importlib.metadata.EntryPoint("from_package", f"{__name__}:Nothing", registry.ENTRY_POINTS),
        importlib.metadata.EntryPoint("broken", "no_such_module:X", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "_entry_points", None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    yield
    registry.unregister("from_package")


def test_an_installed_package_offers_a_processor(installed):
    assert type(create("from_package")).__name__ == "Nothing"


def test_a_package_that_can_not_be_loaded_is_named(installed):
    with pytest.raises(ConfigError, match="broken: no_such_module:X can't be loaded"):
        create("broken")
