"""Who serves a sampling parameter, by release: docs/trtllm.md's table against what the engine does."""

from __future__ import annotations

import pytest

from bireme.config import CHECKOUT
from bireme.errors import RequestError
from bireme.messages import ProcessorCall

COLUMNS = {  # heading -> what the engine YAML says, which part it is, and in which profiles
    "1.2": ({}, "context_and_generation", ("1.2.1",)),
    "1.2, overlap": ({"disable_overlap_scheduler": False}, "context_and_generation", ("1.2.1",)),
    "1.2, prefill and decode apart": ({}, "context_only", ("1.2.1",)),
    "1.2, TRTLLMSampler": ({"sampler_type": "TRTLLMSampler"}, "context_and_generation", ("1.2.1",)),
    "1.3.0rc29, 1.4": ({}, "context_and_generation", ("1.3", "1.4")),
    "1.3.0rc29, 1.4, overlap": ({"disable_overlap_scheduler": False}, "context_and_generation", ("1.3", "1.4")),
    "1.3.0rc29, 1.4, apart": ({}, "context_only", ("1.3", "1.4")),
}
ROWS = {  # the first cell -> sampling parameters, each to be tried
    "`repetition_penalty`, `presence_penalty`, `frequency_penalty`": [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
    ],
    "`bad_words` of one token": [{"bad_token_ids": ((5,),)}],
    "`bad_words` of several tokens": [{"bad_token_ids": ((5, 6),)}],
    "`seed` that the client sends": [{"temperature": 1.0, "seed": 5}],
    "`min_tokens`, one stop id": [{"min_tokens": 3, "end_id": 2}],
    "`min_tokens`, several stop ids": [{"min_tokens": 3, "end_id": 2, "stop_token_ids": (9,)}],
    "`logits_processors` that read tokens": [
        {"logits_processors": (ProcessorCall("frequency_penalty", {"penalty": 1.0}),)}
    ],
    "`logits_processors` that don't": [{"logits_processors": (ProcessorCall("top_k", {"top_k": 5}),)}],
    "`logit_bias`": [{"logit_bias": {5: 1.0}}],
}
TRANSCEIVER = {"cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": 8192}}


def table():
    """Return (row, column) -> cell of the page."""
    page = (CHECKOUT / "docs" / "trtllm.md").read_text().partition("## Who serves a parameter")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    headings = lines[0][1:]
    return {(row[0], heading): cell for row in lines[2:] for heading, cell in zip(headings, row[1:], strict=True)}


def who_serves(harness, seen, kind, sampling):
    """Ask for it; say who does it by what TensorRT-LLM got."""
    from tensorrt_llm._sampling import IGNORED_BY_TORCH_SAMPLER

    try:
        finish = harness.ask(request_type=kind, max_tokens=3, **sampling).wait()
    except RequestError:
        return "refused"
    assert not finish.error, finish.error
    params = seen[-1]
    wanted = {"bad_token_ids", *sampling} - {"temperature", "end_id", "stop_token_ids", "logit_bias"}
    given = {name for name in wanted if getattr(params, name, None)}
    if harness.llm.args.sampler_type != "TRTLLMSampler":
        assert not given & IGNORED_BY_TORCH_SAMPLER - ({"seed"} if "seed" not in sampling else set())
    is_ours = params.logits_processor or ("bad_token_ids" in sampling and params.embedding_bias is not None)
    return "bireme" if is_ours else "TensorRT-LLM"


@pytest.mark.parametrize("heading", COLUMNS)
def test_the_page_says_who_serves_each_parameter(make_engine, profile, monkeypatch, heading):
    yaml, kind, profiles = COLUMNS[heading]
    if profile not in profiles:
        pytest.skip("another column has it")
    harness = make_engine("prefill" if kind == "context_only" else "decode", **TRANSCEIVER, **yaml)
    seen, plain = [], type(harness.llm)._check_params
    monkeypatch.setattr(type(harness.llm), "_check_params", lambda *args: (seen.append(args[1]), plain(*args))[1])
    page = table()
    assert {row for row, _ in page} == ROWS.keys() and {column for _, column in page} == COLUMNS.keys()
    found = {row: {who_serves(harness, seen, kind, one) for one in tries} for row, tries in ROWS.items()}
    assert found == {row: {page[row, heading]} for row in ROWS}


@pytest.mark.parametrize("yaml", [{}, {"disable_overlap_scheduler": False}, {"sampler_type": "TRTLLMSampler"}])
def test_what_is_served_takes_effect(make_engine, profile, yaml):
    if "sampler_type" in yaml and profile != "1.2.1":
        pytest.skip("1.3 has one sampler")
    harness = make_engine(**yaml)
    whole = harness.tokens(max_tokens=40)
    assert whole[0] not in harness.tokens(max_tokens=40, bad_token_ids=((whole[0],),))
    if profile == "1.2.1" and "disable_overlap_scheduler" in yaml:
        return  # penalties are refused there
    pushes = ({"logit_bias": {777: float(bias)}, "max_tokens": 5} for bias in range(100))
    pushed = next(push for push in pushes if harness.tokens(**push) == [777] * 5)  # and by less than a penalty
    for name in ("presence_penalty", "frequency_penalty"):
        assert harness.tokens(**pushed, **{name: 2.0}).count(777) < 5
    assert harness.tokens(max_tokens=40, repetition_penalty=5.0) != whole


def test_neutral_penalties_ask_for_nothing(make_engine):
    harness = make_engine(disable_overlap_scheduler=False)
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert harness.tokens(**neutral) == harness.tokens()


@pytest.mark.parametrize("profile", ["1.2.1"], indirect=True)
def test_what_is_ignored_and_can_not_be_served_is_refused_with_every_way_out(make_engine, profile):
    harness = make_engine(disable_overlap_scheduler=False)
    with pytest.raises(RequestError, match="seed: 5; TensorRT-LLM 1.2.1's sampler ignores seeds; leave it out, set"):
        harness.ask(temperature=1.0, seed=5)
    with pytest.raises(RequestError, match="0.5; .* set disable_overlap_scheduler: true .* 1.3.0rc29"):
        harness.ask(presence_penalty=0.5)
    assert len(harness.tokens(temperature=1.0, seed=5, is_seed_drawn=True, ignore_eos=True)) == 12  # the entry's own


def test_beside_the_overlap_scheduler_only_what_reads_no_tokens_runs(make_engine):
    harness = make_engine(disable_overlap_scheduler=False)
    with pytest.raises(RequestError, match="forced_sequence; it reads the tokens so far"):
        harness.ask(logits_processors=(ProcessorCall("forced_sequence", {"token_ids": [5]}),))
    allowed = (ProcessorCall("allowed_tokens", {"token_ids": [11, 12]}),)
    assert set(harness.tokens(logits_processors=allowed)) <= {11, 12}
