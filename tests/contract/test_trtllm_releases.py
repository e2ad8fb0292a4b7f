"""What differs between the releases: settings that are classes in one and mappings in the next, and VisualGen."""

from __future__ import annotations

import json

import pytest

from bireme.config import EngineConfig
from bireme.engines.registry import create_video_engine
from bireme.engines.video.base import VideoContext
from bireme.errors import ConfigError

ON_1_2 = pytest.mark.parametrize("profile", ["1.2.1"], indirect=True)

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


@ON_1_2
def test_1_2_refuses_the_mapping_itself(profile):
    import tensorrt_llm

    with pytest.raises(ValueError, match="decoding_type: Extra inputs are not permitted"):
        tensorrt_llm.llmapi.llm_args.TorchLlmArgs(model="m", speculative_config=dict(DRAFTS))


def test_sparse_attention_is_made_into_its_class(profile):
    import tensorrt_llm

    from bireme.engines.trtllm.unions import choose_classes

    values = choose_classes({"model": "m", "sparse_attention_config": {"algorithm": "dsa", "index_topk": 64}})
    found = tensorrt_llm.llmapi.llm_args.TorchLlmArgs(**values).sparse_attention_config
    assert type(found).__name__ == "DeepSeekSparseAttentionConfig" and found.index_topk == 64


@pytest.mark.parametrize("profile", ["1.4"], indirect=True)
@pytest.mark.parametrize("is_v2", [None, True, False])
def test_1_4_gives_its_memory_back_without_kv_cache_manager_v2_alone(make_engine, profile, is_v2, caplog):
    kv = {} if is_v2 is None else {"use_kv_cache_manager_v2": is_v2}
    harness = make_engine(sleep_config={}, kv_cache_config=kv)
    assert ("KV cache manager V2 can't give its memory back" in caplog.text) == (is_v2 is not False)
    if is_v2 is False:
        harness.llm.release()
        assert harness.llm.get_memory_status() == {"state": "released"}
        harness.llm.resume()
        assert len(harness.tokens()) == 12
    else:
        with pytest.raises(ValueError, match="V1"):
            harness.llm.release()


@pytest.mark.parametrize("profile", ["1.3", "1.4"], indirect=True)
@pytest.mark.parametrize(
    ("yaml", "told"),
    [
        ({"enable_sleep": True}, "set sleep_config"),
        ({"moe_config": {"backend": "WIDEEP"}}, "set CUTEDSL"),
        ({"max_bacth_size": 3}, "did you mean max_batch_size"),
    ],
)
def test_what_the_installed_package_does_not_know_is_warned_of_and_refused_by_the_package(
    make_engine, profile, yaml, told, caplog
):
    with pytest.raises(ConfigError, match=r"TensorRT-LLM \S+ refuses the engine's arguments"):
        make_engine(**yaml)
    assert told in caplog.text


@pytest.mark.parametrize("profile", ["1.3", "1.4"], indirect=True)
def test_what_late_releases_know_reaches_their_classes(make_engine, profile, caplog):
    kv = {"block_reuse_config": {"policy": "per_request"}, "mamba_state_cache_interval": 0}
    args = make_engine(checkpoint_io_policy="native", kv_cache_config=kv).llm.args
    assert args.checkpoint_io_policy == "native" and args.kv_cache_config.block_reuse_config.policy == "per_request"
    assert "mamba_state_cache_interval: 0; deprecated" in caplog.text


@ON_1_2
def test_1_2_says_that_it_makes_no_videos(profile, tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    with pytest.raises(ConfigError, match=r"TensorRT-LLM 1.2.1 has no VisualGen, which came with 1.3"):
        create_video_engine("trtllm", VideoContext("video_diffusion", str(tmp_path), EngineConfig())).start()
