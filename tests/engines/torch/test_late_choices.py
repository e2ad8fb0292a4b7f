"""Rows that need the host for their tokens, in steps that are started ahead: answered as where every step is landed."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
import tokenizers
import torch

from bireme.config import GuidedDecodingConfig, Limits
from bireme.errors import RequestError
from bireme.logits.guided.guidance import Guidance
from bireme.messages import ProcessorCall
from tests.engines.torch.host_resident import HostResident
from tests.engines.torch.torch_harness import Harness, make_prompts, request

pytest.importorskip("xgrammar")
MODEL = Path(__file__).parents[3] / "models" / "tiny-llama"
TOKENIZER = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")) if MODEL.exists() else None
CALL = TOKENIZER.token_to_id("<tool_call>") if TOKENIZER else 0
PROMPTS = make_prompts(9, 21, 5, 14, seed=3)
SAMPLED = {"temperature": 0.9, "seed": 11}
TAG = {"begin": "<tool_call>", "content": {"type": "regex", "pattern": "[0-9]{4}"}, "end": ";", "type": "tag"}
LATE = (
    {},
    {"temperature": 1.0, "seed": 5, "top_k": 30},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.6, "top_p": 0.9, **SAMPLED},
    {"logit_bias": {100: 9.0, 101: 8.0}, **SAMPLED},
    {"bad_token_ids": ((100,), (101, 102), (7, 8, 9)), **SAMPLED},
    {"min_tokens": 12, "ignore_eos": False, "logit_bias": {2: 12.0}, **SAMPLED},
    {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": tuple(range(0, 4096, 20)), **SAMPLED},
    {"logprobs": 0},
    {"logprobs": 3, "repetition_penalty": 1.3, **SAMPLED},
    {"guided_decoding": {"regex": "[a-z]{3,9}-[0-9]{2,14}"}, "ignore_eos": False},
    {"guided_decoding": {"json_object": True}, "ignore_eos": False, "logprobs": 2, **SAMPLED},
    {"guided_decoding": {"choice": ["north", "south west", "eastward"]}, "ignore_eos": False, "min_tokens": 30},
    {
        "guided_decoding": {"structural_tag": {"format": TAG}, "trigger": {"token": CALL}},
        "ignore_eos": False,
        "logit_bias": {CALL: 7.0},
        **SAMPLED,
    },
    {"logits_processors": (ProcessorCall("temperature", {"temperature": 0.7}),), **SAMPLED},
)
LIMITS = Limits(max_guide_bytes=1 << 31, max_guide_depth=1 << 31, max_bad_words=4096)
pytestmark = [
    pytest.mark.skipif(TOKENIZER is None, reason="models/tiny-llama is missing: make models"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="it draws on the host what a GPU has drawn itself"),
]


def opened(**settings):
    config = GuidedDecodingConfig(compile_timeout_s=20, num_processes=1)
    return Harness(str(MODEL), limits=LIMITS, guided_decoding_config=config, tokens_per_block=8, **settings)


def asked(at):
    return request(PROMPTS[at % len(PROMPTS)], 20 + at, **LATE[at])


def told(result):
    """Return what a client learns."""
    finish = result.finish
    entries = [one for entry in result.logprobs for one in entry]
    ids, values = [one.token for one in entries], [one.logprob for one in entries]
    return finish.error, finish.reason, finish.stop_token_id, result.tokens, ids, values


def alike(answers):
    """Return what answers in steps of other rows are compared with: on a GPU their sums differ in the last digits."""
    if not torch.cuda.is_available():
        return answers
    return [(*answer[:-1], pytest.approx(answer[-1], abs=1e-3)) for answer in answers]


@pytest.fixture(scope="module")
def landed():
    """Return the answers of an engine that lands every step, and looks at each request alone."""
    with opened() as engine:
        answers = [told(engine.submit(asked(at))) for at in range(len(LATE))]
    # A batch's sums differ in their last digits.
    return [(*answer[:-1], pytest.approx(answer[-1], abs=0.01)) for answer in answers]


@pytest.fixture(scope="module")
def ahead():
    with opened() as engine:
        yield engine, HostResident.put_into(engine.core._parts)


def test_answers_are_those_of_landed_steps_whenever_requests_come(ahead, landed):
    (engine, resident), moments = ahead, random.Random(4)
    for _ in range(2):
        order = moments.sample(range(len(LATE) - 1), len(LATE) - 1)
        results = []
        for at in order:
            results.append(engine.submit(asked(at)))
            time.sleep(moments.random() * 0.01)
        assert [told(one) for one in results] == [landed[at] for at in order]
    assert not any(error for error, *_ in landed) and CALL in landed[13][3]
    assert resident.num_ahead >= resident.num_chosen_again > 20
    engine.settle()
    assert engine.manager.num_referenced == 0


@pytest.mark.parametrize("at", [2, 9, 10, 13])
def test_a_late_row_alone_is_started_ahead_at_each_of_its_steps(ahead, landed, at):
    engine, resident = ahead
    engine.settle()
    before = resident.num_ahead
    assert told(engine.submit(asked(at))) == landed[at]
    assert resident.num_ahead - before >= len(landed[at][3]) - 3


def test_a_request_s_own_processors_hold_their_batch_up_and_no_later_one(ahead, landed):
    engine, resident = ahead
    engine.settle()
    before = resident.num_ahead
    assert told(engine.submit(asked(14))) == landed[14] and resident.num_ahead == before
    results = [engine.submit(asked(at)) for at in (14, 3, 10)]
    assert [told(one) for one in results] == [landed[at] for at in (14, 3, 10)]


def test_a_guide_that_fails_ends_its_own_request_after_the_tokens_that_it_allowed(ahead, landed, monkeypatch):
    engine, _ = ahead
    fill, regex = Guidance.fill, LATE[10]["guided_decoding"]

    def fail(self, bitmask, row):
        fill(self, bitmask, row)
        if (count := counts.setdefault(self, 0)) == 3:
            raise RequestError("guided_decoding: no more")
        counts[self] = count + 1

    counts = {}
    monkeypatch.setattr(Guidance, "fill", fail)
    results = [engine.submit(request(PROMPTS[2], 30, guided_decoding=regex, ignore_eos=False)), engine.submit(asked(3))]
    assert results[0].finish.error.endswith("guided_decoding: no more") and results[0].tokens == landed[10][3][:3]
    assert told(results[1]) == landed[3]


def test_edits_that_leave_nothing_are_named_and_others_go_on(ahead, landed):
    engine, _ = ahead
    digits = tuple((token,) for token in range(4096) if re.search("[0-9]", TOKENIZER.decode([token]) or ""))
    bad = engine.submit(
        request(PROMPTS[0], 20, guided_decoding={"regex": "[0-9]+"}, ignore_eos=False, bad_token_ids=digits)
    )
    beside = engine.submit(asked(3))
    assert (
        bad.finish.error.startswith("INVALID_ARGUMENT: guided_decoding") and "exclude every token" in bad.finish.error
    )
    assert told(beside) == landed[3]


def test_a_choice_that_fails_ends_its_step_s_requests_and_no_later_ones(ahead, landed, monkeypatch):
    engine, _ = ahead
    engine.settle()
    with monkeypatch.context() as changed:
        changed.setattr(engine.core._late, "choose", lambda flight, batch: 1 / 0)
        failed = engine.submit(asked(3))
        assert "ZeroDivisionError" in failed.finish.error
    assert told(engine.submit(asked(9))) == landed[9]


def test_late_rows_that_are_aborted_leave_nothing(ahead, landed):
    (engine, _), moments = ahead, random.Random(1)
    kept = engine.submit(asked(9))
    for at in (2, 10, 11, 5):
        one = engine.submit(asked(at))
        time.sleep(moments.random() * 0.02)
        engine.abort(one)
    assert told(kept) == landed[9]
    engine.settle()
    assert engine.manager.num_referenced == 0 and not engine.core._parts.sampler.late


@pytest.mark.parametrize(
    "settings",
    [{"disable_overlap_scheduler": True}, {"max_tokens": 12 * 8, "max_batch_size": 4}, {"max_num_tokens": 16}],
)
def test_without_overlap_where_blocks_run_out_and_of_prompts_in_parts_they_are_answered_alike(landed, settings):
    numbers = (3, 9, 10, 6, 11)
    with opened(queue={"capacity_scheduler_policy": "MAX_UTILIZATION"}, max_seq_len=64, **settings) as engine:
        resident = HostResident.put_into(engine.core._parts)
        results = [engine.submit(asked(at)) for at in numbers]
        assert [told(one) for one in results] == [landed[at] for at in numbers]
        if "disable_overlap_scheduler" in settings:
            assert resident.num_ahead == 0
        else:
            assert resident.num_ahead and bool(engine.core.scheduler.num_preemptions) is ("max_tokens" in settings)
