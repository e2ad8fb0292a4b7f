"""Guides that hold from one token on: until it comes the answer is free, whatever its text spells."""

from __future__ import annotations

import pytest

from bireme.config import GuidedDecodingConfig
from bireme.errors import RequestError
from bireme.guides import Trigger
from bireme.logits.guided.compiler import GuideCompiler
from bireme.logits.guided.guidance import allocate
from bireme.logits.guided.triggered import TriggeredGuidance
from bireme.logits.rows import Row
from bireme.messages import SamplingParams
from tests.logits.guided.test_compiler import BYTES, EOS, compiled, is_allowed

pytest.importorskip("xgrammar")
TOOL, OTHER = 257, 1 + ord("x")
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
CALL = {"type": "tag", "begin": "<tool>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</tool>"}
TAG = {"format": CALL}


@pytest.fixture(scope="module")
def grammar():
    compiler = GuideCompiler(lambda: BYTES, (EOS,), GuidedDecodingConfig(num_processes=1, compile_timeout_s=30))
    yield compiled(compiler, structural_tag=TAG)
    compiler.close()


def ids(text):
    return [byte + 1 for byte in text.encode()]


def made(grammar, reasoning_end="", token=TOOL, **trigger):
    return TriggeredGuidance(grammar, BYTES, (EOS,), Trigger(token=token, **trigger), reasoning_end)


def allowed(guidance):
    mask = allocate(1, BYTES.vocab_size)
    guidance.fill(mask, 0)
    return {token for token in range(BYTES.vocab_size) if is_allowed(mask, token)}


def follow(guidance, tokens):
    """Push tokens through, each of which must be allowed; return how many of them came while it was free."""
    num_free = 0
    for token in tokens:
        num_free += guidance.is_free
        assert guidance.is_free or token in allowed(guidance), token
        guidance.accept(token)
    return num_free


def test_text_that_spells_the_mark_triggers_nothing(grammar):
    guidance = made(grammar)
    assert follow(guidance, ids('see <tool>{"b": 7}')) == 18 and guidance.is_free


def test_from_the_token_on_only_a_call_can_come_and_then_the_answer_is_free_again(grammar):
    guidance = made(grammar)
    assert follow(guidance, [*ids("so "), TOOL]) == 4
    assert allowed(guidance) == {1 + ord("{")}
    follow(guidance, ids('{"a": '))
    assert allowed(guidance) == set(ids("12"))
    follow(guidance, ids("2}</tool>"))
    assert guidance.is_free
    assert follow(guidance, [*ids("\n"), TOOL]) == 2 and allowed(guidance) == {1 + ord("{")}


def test_a_call_that_is_the_only_one_ends_the_answer(grammar):
    guidance = made(grammar, stop_after_first=True)
    follow(guidance, [TOOL, *ids('{"a": 1}</tool>')])
    assert allowed(guidance) == {EOS} and guidance.must_stop
    with pytest.raises(RequestError, match="follows the one guided part"):
        guidance.accept(OTHER)
    guidance.accept(EOS)


@pytest.mark.parametrize("begin", ["", "<think>"])
def test_in_the_reasoning_the_token_triggers_nothing(grammar, begin):
    guidance = made(grammar, "</think>", reasoning_begin=begin)
    assert follow(guidance, [*ids(f"\n{begin}should I "), TOOL, *ids("? </think></think>"), TOOL]) > 20
    assert not guidance.is_free


@pytest.mark.parametrize("answer", ["", "\n", "<th", "<thank you>", "no <think> at the start"])
def test_an_answer_that_does_not_begin_with_reasoning_has_none(grammar, answer):
    guidance = made(grammar, "</think>", reasoning_begin="<think>")
    follow(guidance, [*ids(answer), TOOL])
    assert allowed(guidance) == {1 + ord("{")}


def test_a_token_that_does_not_begin_the_guide_is_refused(grammar):
    with pytest.raises(RequestError, match="trigger.token: 121 .*does not begin what the guide allows"):
        made(grammar, token=OTHER)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_is_as_simple_as_without_a_guide_where_it_is_free(grammar, temperature):
    guidance = made(grammar)
    row = Row(SamplingParams(temperature=temperature, seed=1), [], [], (EOS,), BYTES.vocab_size, (), guidance)
    kinds = []
    for token in [OTHER, TOOL, *ids('{"a": 1}</tool>')]:
        kinds.append((row.is_simple, row.is_plain))
        row.append(token)
    is_greedy = not temperature
    assert kinds == [(True, is_greedy)] * 2 + [(False, False)] * 15
    assert (row.is_simple, row.is_plain) == (True, is_greedy)


def test_a_guide_that_is_replayed_is_where_it_was(grammar):
    tokens = [*ids("<think>a"), TOOL, *ids("</think>b"), TOOL, *ids('{"a": 1}</tool>c'), TOOL, *ids('{"a"')]
    live = made(grammar, "</think>", reasoning_begin="<think>")
    for at, token in enumerate(tokens):
        moved = made(grammar, "</think>", reasoning_begin="<think>")
        for earlier in tokens[:at]:
            moved.accept(earlier)
        assert moved.is_free is live.is_free and (live.is_free or allowed(moved) == allowed(live))
        live.accept(token)
    assert allowed(live) & set(ids("abc:{}12")) == set(ids(":"))
