"""Prompts are encoded at once or on threads, and not more wait than a recipe allows."""

import asyncio
import threading

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models

from bireme.config import Limits
from bireme.errors import RequestError, ResourceExhaustedError
from bireme.text.prompt_encoder import PromptEncoder
from bireme.text.tokenizer import TextTokenizer

LONG = 10_000  # characters


@pytest.fixture
def encoder():
    tokenizer = TextTokenizer(Inner(models.WordLevel({"a": 1}, unk_token="a")))
    encoder = PromptEncoder(tokenizer, Limits(max_concurrent_requests=1, max_prompt_bytes=100))
    yield encoder
    encoder.close()


async def test_a_short_prompt_is_encoded_at_once_and_a_long_one_on_a_thread(encoder):
    assert await encoder.run(threading.get_ident, 1) == threading.get_ident()
    assert await encoder.run(threading.get_ident, LONG) != threading.get_ident()


async def test_more_long_prompts_than_requests_are_allowed_are_refused(encoder):
    go_on = threading.Event()
    first = asyncio.ensure_future(encoder.run(go_on.wait, LONG))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="1 requests are being tokenised; try again"):
        await encoder.run(threading.get_ident, LONG)
    assert await encoder.run(lambda: "short", 1) == "short"
    go_on.set()
    assert await first


def test_a_text_that_is_too_large_is_named(encoder):
    with pytest.raises(RequestError, match="text_input: 101 bytes"):
        encoder.check("text_input", "a" * 101)
