"""Guides compiled in helper processes: cache, limits, and what a hopeless guide does to others."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import resource
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bireme.config import GuidedDecodingConfig, Limits
from bireme.errors import BiremeError, RequestError, ResourceExhaustedError, UnavailableError
from bireme.guides import parse_guide
from bireme.logits.guided import compile_client
from bireme.logits.guided.compile_client import CompileClient
from bireme.logits.guided.compiler import GuideCompiler
from bireme.logits.guided.guidance import Guidance, allocate
from bireme.logits.guided.vocabulary import make_table

pytest.importorskip("xgrammar")
EOS = 0
ALL = [b"</s>", *(bytes([at]) for at in range(256)), b"<tool>"]
BYTES = make_table([None] * len(ALL), dict(enumerate(ALL)), {0, 257}, len(ALL))


@pytest.fixture(scope="module")
def shared():
    compiler = GuideCompiler(lambda: BYTES, (EOS,), GuidedDecodingConfig(num_processes=1, compile_timeout_s=30))
    yield compiler
    compiler.close()


@pytest.fixture
def make():
    made: list[GuideCompiler] = []

    def get(**settings):
        made.append(GuideCompiler(lambda: BYTES, (EOS,), GuidedDecodingConfig(**{"num_processes": 1} | settings)))
        return made[-1]

    yield get
    for compiler in made:
        compiler.close()


def ask(compiler, **raw):
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    compiler.compile(parse_guide(raw, Limits()), answers.put)
    return answers


def compiled(compiler, **raw):
    answer = ask(compiler, **raw).get(timeout=60)
    if isinstance(answer, BiremeError):
        raise answer
    return answer


@pytest.mark.parametrize("raw", [{"json": {"type": "string"}}, {"json": {"type": "string", "maxLength": 2}}])
def test_a_guide_lets_no_surrogate_through(shared, raw):
    guidance, mask = Guidance(compiled(shared, **raw), BYTES, (EOS,)), allocate(1, BYTES.vocab_size)
    for byte in b'"\xed':
        guidance.fill(mask, 0)
        assert is_allowed(mask, byte + 1)
        guidance.accept(byte + 1)
    guidance.fill(mask, 0)
    assert [byte for byte in range(256) if is_allowed(mask, byte + 1)] == list(range(0x80, 0xA0))
    guidance.accept(0x9F + 1)
    guidance.fill(mask, 0)
    assert [byte for byte in range(256) if is_allowed(mask, byte + 1)] == list(range(0x80, 0xC0))


def test_tokens_with_a_surrogate_stand_for_nothing():
    tokens = [b"</s>", b"a\xed\xa0\x80", b"\xed\x9f\xbf", b"\xa0b", b"b\xed"]
    table = make_table([None] * len(tokens), dict(enumerate(tokens)), {0}, len(tokens))
    assert table.view("plain", ()) == [b"", b"", *tokens[2:]]
    assert table.half_ids == {4} and table.other_half_mask.tolist() == [1 << 3]


def follow(compiler, text, reasoning_end="", **raw):
    """Push a text through its guide byte by byte; return what was taken, with $ where the end was allowed."""
    guidance = Guidance(compiled(compiler, **raw), BYTES, (EOS,), reasoning_end)
    mask, taken = allocate(1, BYTES.vocab_size), b""
    for byte in text.encode():
        guidance.fill(mask, 0)
        if not is_allowed(mask, byte + 1):
            return taken.decode(errors="replace")
        guidance.accept(byte + 1)
        taken += bytes([byte])
    guidance.fill(mask, 0)
    return taken.decode() + ("$" if is_allowed(mask, EOS) else "")


def is_allowed(mask, token):
    return bool(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[token])


def test_a_regex_lets_through_what_it_matches(shared):
    assert follow(shared, "ab12", regex="[a-c]+[0-9]{2}") == "ab12$"
    assert follow(shared, "abd1", regex="[a-c]+[0-9]{2}") == "ab"


def test_a_choice_allows_exactly_its_texts(shared):
    choice = ['say "hi"', "back\\slash", "naïve 😀", "tab\t"]
    assert [follow(shared, text, choice=choice) for text in choice] == [text + "$" for text in choice]
    assert follow(shared, "say no", choice=choice) == "say "


def test_a_grammar_starts_at_root(shared):
    grammar = 'root ::= "(" root ")" | digit\ndigit ::= [0-9]'
    assert follow(shared, "((7))", grammar=grammar) == "((7))$"


def test_a_json_schema_keeps_the_order_of_its_properties(shared):
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}, "required": ["b", "a"]}
    assert follow(shared, '{"b": 1, "a": null}', json=schema) == '{"b": 1, "a": null}$'
    assert follow(shared, '{"b": 1, "a": null}', json=json.dumps(schema)) == '{"b": 1, "a": null}$'
    assert follow(shared, '{"a"', json=schema) == '{"'


def test_json_has_one_layout_unless_any_is_asked_for(make):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert follow(make(), '{\n"a": 1}', json=schema) == "{"
    assert follow(make(any_whitespace=True), '{\n"a":  1}', json=schema) == '{\n"a":  1}$'


def test_a_json_object_is_any_object(shared):
    assert follow(shared, '{"x": [1, {"y": null}]}', json_object=True) == '{"x": [1, {"y": null}]}$'
    assert follow(shared, "[1]", json_object=True) == ""


def test_special_tokens_are_for_structural_tags_only(shared):
    tag = {
        "format": {"type": "tag", "begin": "<tool>", "content": {"type": "json_schema", "json_schema": True}, "end": ""}
    }
    marked, plain = (compiled(shared, **raw) for raw in ({"structural_tag": tag}, {"regex": "<tool>.*"}))
    for grammar, expected in ((marked, True), (plain, False)):
        guidance, mask = Guidance(grammar, BYTES, (EOS,)), allocate(1, BYTES.vocab_size)
        guidance.fill(mask, 0)
        assert is_allowed(mask, 257) is expected


def test_reasoning_is_free_until_its_end(shared):
    assert follow(shared, "hm </think>7", "</think>", regex="[0-9]") == "hm </think>7$"
    assert follow(shared, "hm </think>x", "</think>", regex="[0-9]") == "hm </think>"


def test_a_blank_line_after_the_reasoning_is_free(shared):
    assert follow(shared, "{</th\n</think>\n\n7", "</think>", regex="[0-9]") == "{</th\n</think>\n\n7$"
    assert follow(shared, "</think>\n\n\n7", "</think>", regex="[0-9]") == "</think>\n\n"


def test_the_answer_does_not_end_within_the_reasoning(shared):
    guidance, mask = Guidance(compiled(shared, regex="a"), BYTES, (EOS,), "</think>"), allocate(1, BYTES.vocab_size)
    guidance.fill(mask, 0)
    assert not is_allowed(mask, EOS) and is_allowed(mask, 1 + ord("{"))


def test_a_complete_guide_must_stop(shared):
    guidance, mask = Guidance(compiled(shared, regex="a"), BYTES, (EOS,)), allocate(1, BYTES.vocab_size)
    guidance.fill(mask, 0)
    assert not guidance.must_stop
    guidance.accept(1 + ord("a"))
    guidance.fill(mask, 0)
    assert guidance.must_stop and is_allowed(mask, EOS)


def test_a_token_that_is_not_allowed_is_refused(shared):
    guidance = Guidance(compiled(shared, regex="a"), BYTES, (EOS,))
    with pytest.raises(RequestError, match="not allowed here"):
        guidance.accept(1 + ord("b"))


def test_equal_guides_are_compiled_once(make):
    compiler = make()
    answers = [ask(compiler, regex="x+") for _ in range(5)]
    assert len({id(one.get(timeout=60)) for one in answers}) == 1
    assert compiled(compiler, regex="x+") is compiled(compiler, regex="x+")
    assert (compiler.counts.compiled, compiler.counts.hits) == (1, 2)


def test_the_cache_forgets_what_was_used_longest_ago(make):
    compiler = make(cache_bytes=4096)
    for text in "abcdefgh":
        compiled(compiler, regex=text)
    compiled(compiler, regex="h")
    compiled(compiler, regex="a")
    assert (compiler.counts.compiled, compiler.counts.hits) == (9, 1)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"regex": "a(b"}, "parenthesis is not closed"),
        ({"regex": "(?=a)b"}, "Lookahead"),
        ({"grammar": "root ::= foo"}, '"foo" is not defined'),
        ({"json": {"type": "string", "pattern": 'a"b'}}, "quotes, backslashes and control characters"),
        ({"json": False}, "cannot accept any value"),
        ({"json": {"type": "strange"}}, "strange"),
        ({"structural_tag": {"format": {"type": "nothing"}}}, "guided_decoding.structural_tag"),
    ],
)
def test_what_can_t_be_compiled_is_refused_by_name(shared, raw, words):
    with pytest.raises(RequestError, match="guided_decoding") as caught:
        compiled(shared, **raw)
    assert words in str(caught.value)


def test_a_failure_is_remembered(make):
    compiler = make()
    for _ in range(2):
        with pytest.raises(RequestError):
            compiled(compiler, regex="a(b")
    assert compiler.counts.failed == 1


def test_a_guide_that_takes_too_long_ends_and_the_next_one_is_served(make):
    compiler = make(compile_timeout_s=0.05)
    with pytest.raises(RequestError, match="compile_timeout_s"):
        compiled(compiler, json={"enum": [f"value {at}" for at in range(12000)]})
    compiler._config = msgspec.structs.replace(compiler._config, compile_timeout_s=30)
    assert follow(compiler, "a", regex="a") == "a$"


@pytest.mark.flaky(reruns=1)
def test_a_helper_that_dies_costs_one_guide(make):
    compiler = make()
    compiled(compiler, regex="a")
    compiler._clients[0]._process.kill()
    compiler._clients[0]._process.wait()
    assert follow(compiler, "b", regex="b") == "b$"


def test_a_vocabulary_that_could_not_be_opened_is_sent_again(shared):
    compiled(shared, regex="a")
    client, request = CompileClient(), {"view": "plain", "kind": "regex", "text": "a", "any_whitespace": False}
    try:
        with pytest.raises(RequestError):
            client.compile(request, "no vocabulary", 30, 1 << 20)
        assert client.compile(request, shared._infos["plain"][1], 30, 1 << 20)
    finally:
        client.close()


def test_a_helper_answers_through_a_high_descriptor():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    low, writing = os.pipe()
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500)
    try:
        os.write(writing, compile_client.U32.pack(3) + b"+{}")
        with os.fdopen(high, "rb", closefd=False) as stream:
            process: Any = types.SimpleNamespace(stdout=stream)
            assert compile_client._read(process, time.monotonic() + 10, 10) == b"+{}"
    finally:
        for descriptor in (low, writing, high):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_guide_that_is_too_large_compiled_is_refused(make):
    with pytest.raises(RequestError, match="max_compiled_bytes is 1000"):
        compiled(make(max_compiled_bytes=1000), json_object=True)


def test_the_queue_is_bounded(make):
    compiler = make(max_queue_size=1)
    held = threading.Event()
    compiler._answer = lambda client, guide: (held.wait(10), (RequestError("later"), 0))[1]
    first = ask(compiler, regex="1")
    while compiler._queue:
        time.sleep(0.001)
    ask(compiler, regex="2")
    with pytest.raises(ResourceExhaustedError, match="max_queue_size is 1"):
        compiled(compiler, regex="3")
    held.set()
    assert str(first.get(timeout=10)) == "later"


def test_closing_ends_what_waits(make):
    compiler = make()
    waiting = ask(compiler, json={"enum": [f"value {at}" for at in range(12000)]})
    compiler.close()
    assert isinstance(waiting.get(timeout=10), UnavailableError)
    assert isinstance(ask(compiler, regex="a").get(timeout=1), UnavailableError)


def test_the_helper_process_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from bireme.logits.guided.compile_process import import_lightly; import_lightly();"
        "print(sys.modules['torch'], hasattr(sys.modules['transformers'], '__file__'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.split() == ["None", "False"]


def test_a_release_whose_parts_lie_elsewhere_is_imported_whole_and_compiles():
    code = (
        "from bireme.logits.guided import compile_process as process; process._PARTS += ('moved',);"
        "process.import_lightly(); from xgrammar import TokenizerInfo, apply_token_bitmask_inplace;"
        "info = TokenizerInfo([b'a', b'</s>'], stop_token_ids=[1]).serialize_json();"
        "ask = {'view': 'plain', 'info': info, 'kind': 'regex', 'text': 'a+', 'any_whitespace': False};"
        "print(process.Compiler().answer(ask)[:1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd())
    assert done.stdout.strip() == "b'+'", done.stderr
    assert "xgrammar.moved" in done.stderr
