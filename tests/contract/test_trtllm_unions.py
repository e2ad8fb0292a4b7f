"""speculative_config and sparse_attention_config reach the LLM in the form that each release takes."""

from __future__ import annotations

import pytest

DRAFTS = {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2}
EAGLE = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "org/eagle"}


def test_drafts_are_made_into_their_class(make_engine):
    found = make_engine(speculative_config=dict(DRAFTS)).llm.args.speculative_config
    assert type(found).__name__ == "NGramDecodingConfig" and found.max_draft_len == 3


def test_the_old_name_of_the_draft_model_is_taken(make_engine):
    assert make_engine(speculative_config=dict(EAGLE)).llm.args.speculative_config.speculative_model == "org/eagle"


def test_the_yaml_s_mapping_stays_as_it_is(make_engine):
    harness = make_engine(speculative_config=dict(DRAFTS))
    assert harness.engine is not None
    from bireme.engines.trtllm.unions import choose_classes

    values = {"speculative_config": dict(DRAFTS)}
    choose_classes(values)
    assert values == {"speculative_config": DRAFTS}


def test_1_2_refuses_the_mapping_itself(profile):
    import tensorrt_llm

    if profile != "1.2.1":
        pytest.skip("later releases take it")
    with pytest.raises(ValueError, match="decoding_type: Extra inputs are not permitted"):
        tensorrt_llm.llmapi.llm_args.TorchLlmArgs(model="m", speculative_config=dict(DRAFTS))


def test_sparse_attention_is_made_into_its_class(profile):
    import tensorrt_llm

    from bireme.engines.trtllm.unions import choose_classes

    values = choose_classes({"model": "m", "sparse_attention_config": {"algorithm": "dsa", "index_topk": 64}})
    found = tensorrt_llm.llmapi.llm_args.TorchLlmArgs(**values).sparse_attention_config
    assert type(found).__name__ == "DeepSeekSparseAttentionConfig" and found.index_topk == 64
