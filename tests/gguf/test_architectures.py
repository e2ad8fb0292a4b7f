"""config.json of a GGUF file: what its keys and tensors say, what can't be served refused by name."""

import math

import numpy as np
import pytest

from bireme.errors import ConfigError
from bireme.gguf.architectures import config_of, weights_of
from bireme.gguf.head import read_head
from tests.gguf.files import write

HIDDEN, HEADS, HEAD_DIM, VOCAB = 32, 4, 8, 40


def llama(folder, more=(), tensors=(), architecture="llama"):
    """Write a file of one layer; `more` and `tensors` over its own, None takes one away."""
    keys = {
        "embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": 64, "context_length": 128,
        "attention.head_count": HEADS, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
    }  # fmt: skip
    metadata = {"general.architecture": architecture} | {f"{architecture}.{name}": keys[name] for name in keys}
    own = {
        "token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,), "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,), "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (2 * HEAD_DIM, HIDDEN), "blk.0.attn_v.weight": (2 * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM), "blk.0.ffn_gate.weight": (64, HIDDEN),
        "blk.0.ffn_up.weight": (64, HIDDEN), "blk.0.ffn_down.weight": (HIDDEN, 64),
    }  # fmt: skip
    values = {name: np.ones(shape) for name, shape in own.items()} | dict(tensors)
    metadata = {key: value for key, value in (metadata | dict(more)).items() if value is not None}
    return read_head(
        write(folder / "m.gguf", metadata, {name: each for name, each in values.items() if each is not None})
    )


def test_sizes_and_the_tied_head_come_from_keys_and_tensors(tmp_path):
    config = config_of(llama(tmp_path))
    assert (config["vocab_size"], config["head_dim"], config["tie_word_embeddings"]) == (VOCAB, HEAD_DIM, True)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (
        config_of(llama(tmp_path, tensors={"output.weight": np.ones((VOCAB, HIDDEN))}))["tie_word_embeddings"] is False
    )


def divisors(factor, theta=500000.0, low=1.0, high=4.0, original=8192):
    """What transformers' rope type llama3 divides frequencies by."""
    found = []
    for at in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * theta ** (at / HEAD_DIM)
        smooth = (original / wavelength - low) / (high - low)
        found.append(1 / ((1 - min(max(smooth, 0), 1)) / factor + min(max(smooth, 0), 1)))
    return np.array(found)


def test_llama_3_scaling_is_found_in_its_divisors(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    head = llama(tmp_path, tensors={"rope_freqs.weight": divisors(32.0)})
    config = config_of(head)
    assert config["rope_parameters"] | {"rope_theta": 0} == {
        "rope_type": "llama3", "rope_theta": 0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert "rope_freqs.weight" not in {
        part.name for weight in weights_of(head, config).values() for part in weight.parts
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    plain = 1 / 500000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert np.allclose(model.model.rotary_emb.inv_freq.numpy() * divisors(32.0), plain, rtol=1e-5)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 32},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        ({"type": "none"}, {"rope_type": "default"}),
    ],
)  # fmt: skip
def test_scaling_of_positions_has_transformers_names(tmp_path, more, expected):
    config = config_of(llama(tmp_path, {f"llama.rope.scaling.{name}": value for name, value in more.items()}))
    assert config["rope_parameters"] == {"rope_theta": 500000.0} | expected


@pytest.mark.parametrize(
    ("more", "tensors", "text"),
    [
        ({"llama.block_count": 2}, {}, "llama.block_count: 2; there are tensors of 1 layers"),
        ({"llama.block_count": 1 << 30}, {}, "1 to 1024 is expected"),
        ({"llama.embedding_length": 64}, {}, "token_embd.weight has shape .40, 32., its metadata say"),
        ({"llama.attention.head_count": 8, "llama.attention.key_length": 8}, {}, "blk.0.attn_q.weight has shape"),
        ({"llama.attention.head_count_kv": 3}, {}, "head_count_kv: 3; 4 query heads are no multiple"),
        ({"llama.attention.sliding_window": 64}, {}, "sliding_window: 64; windows of llama are not served"),
        ({"llama.context_length": None}, {}, "llama.context_length is missing"),
        ({"llama.rope.freq_base": 0.0}, {}, "a number above 0"),
        ({"llama.rope.scaling.type": "other"}, {}, "rope.scaling.type: other; none, linear, yarn and longrope"),
        ({}, {"rope_freqs.weight": np.arange(1.0, 5.0)}, "not the divisors of Llama 3.1"),
        ({}, {"rope_freqs.weight": np.full(4, np.nan)}, "numbers above 0"),
        ({}, {"blk.0.ssm_in.weight": np.ones((2, 2))}, "'blk.0.ssm_in.weight' is no part of LlamaForCausalLM"),
        ({"general.architecture": "mamba"}, {}, "'mamba' is not served as GGUF .served are .*qwen3"),
        ({"llama.expert_count": 2, "llama.expert_used_count": 1}, {}, "blk.0.ffn_gate_exps.weight is missing"),
    ],
)
def test_what_can_not_be_served_is_refused_by_name(tmp_path, more, tensors, text):
    head = llama(tmp_path, more, tensors)
    with pytest.raises(ConfigError, match=text) as raised:
        weights_of(head, config_of(head))
    assert str(raised.value).startswith("m.gguf: ")
