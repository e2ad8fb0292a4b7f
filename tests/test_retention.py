"""How long KV blocks are kept, as a request says it: one object, from every entry, checked before an engine sees it."""

from __future__ import annotations

import json

import msgspec
import pytest

from bireme.config import Recipe
from bireme.errors import RequestError
from bireme.openai.text.completion_request import CompletionBody, check_completion
from bireme.pipelines.chat_request import parse_chat
from bireme.serving_options import KvCacheRetentionConfig, TokenRangeRetention, parse_retention

RECIPE = Recipe(model="m", workers={})
TEXT = '{"token_range_retention_configs": [{"token_start": 0, "token_end": 64, "priority": 90, "duration_ms": 500}]}'
CONFIG = KvCacheRetentionConfig(
    token_range_retention_configs=(TokenRangeRetention(token_start=0, token_end=64, priority=90, duration_ms=500),)
)


def ranges(*parts):
    names = ("token_start", "token_end", "priority", "duration_ms")
    return {"token_range_retention_configs": [dict(zip(names, part, strict=False)) for part in parts]}


def test_the_tensor_is_tensorrt_llms_object_as_json():
    assert parse_retention(TEXT) == CONFIG
    assert parse_retention("") is None


@pytest.mark.parametrize("entry", ["chat", "completion"])
def test_openai_requests_have_it_in_their_bireme_object(entry):
    body = {"model": "m", "bireme": {"kv_cache_retention_config": json.loads(TEXT)}}
    if entry == "chat":
        found = parse_chat(json.dumps(body | {"messages": [{"role": "user", "content": "a"}]}), RECIPE)
    else:
        found = check_completion(msgspec.convert(body | {"prompt": "a"}, CompletionBody), RECIPE)
    assert found.options.kv_cache_retention_config == CONFIG


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[]", "Expected `object`, got `array`; send a JSON object with token_range_retention_configs"),
        ('{"priority": 3}', "unknown field `priority`"),
        ('{"decode_retention_priority": 101}', "decode_retention_priority: 101; 0 to 100"),
        ('{"decode_duration_ms": 0}', "decode_duration_ms: 0; 1 to"),
        (ranges((0, 8, -1)), r"token_range_retention_configs\[0\].priority: -1; 0 to 100"),
        (ranges((0, 8, 3, 2**40)), r"\[0\].duration_ms: 1099511627776; 1 to 2147483647 milliseconds"),
        (ranges((0, 8, 3), (9, 9, 3)), r"\[1\]: tokens 9 to 9; token_start is 0 or more, token_end is behind it"),
        (ranges((-4, 8, 3)), "tokens -4 to 8"),
        (ranges((8, None, 3), (0, 9, 3)), "ranges from tokens 0 and 8 overlap"),
        (ranges((0, None, 3), (9, 10, 3)), "ranges from tokens 0 and 9 overlap"),
        (ranges(*((at, at + 1, 3) for at in range(65))), "65 ranges; the limit is 64"),
    ],
)
def test_what_no_cache_can_do_is_refused_by_name(value, problem):
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(RequestError, match=f"^kv_cache_retention_config.*{problem}"):
        parse_retention(text)
