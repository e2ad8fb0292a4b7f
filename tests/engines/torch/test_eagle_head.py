"""An EAGLE-3 head in the published layout is computed over paged KV as all at once, and a wrong one is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bireme.engines.torch.forward.attention import Extras
from bireme.engines.torch.forward.decoder_ops import PlainOps, choose_ops
from bireme.engines.torch.forward.eagle_head import EagleHead
from bireme.engines.torch.forward.flash_attention import FlashAttention
from bireme.engines.torch.forward.kernel_step import attend_stored
from bireme.engines.torch.kernels.rotary import rotate_and_store
from bireme.engines.torch.step import DecodeTable, KernelGroup
from bireme.engines.torch.weights.eagle_checkpoint import read_eagle
from bireme.errors import ConfigError
from tests.engines.torch.eagle_heads import BASE, MID, make_tensors, paged, published, write_head

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_head(folder, dtype=torch.float32):
    return EagleHead.of(read_eagle(folder, BASE), dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("make_ops", [PlainOps, "compiled"], ids=str)
def test_over_paged_kv_it_computes_what_the_published_layer_does_all_at_once(tmp_path, make_ops, dtype):
    """A prompt of 9 tokens, then 4 decode rows of the same sequence across blocks."""
    head = open_head(write_head(tmp_path), dtype)
    embeddings, tapped = torch.randn(13, 32).to(dtype), torch.randn(13, 96).to(dtype)
    hidden = head.fuse(tapped)
    attend_of = paged(head, choose_ops() if make_ops == "compiled" else make_ops)
    parts = [
        head(embeddings[first:last], hidden[first:last], torch.arange(first, last), attend_of(first, last))
        for first, last in ((0, 9), (9, 13))
    ]
    tensors = {name: own.to(dtype) for name, own in make_tensors().items()}
    torch.testing.assert_close(hidden, tapped @ tensors["fc.weight"].T)
    for found, expected in zip(zip(*parts, strict=True), published(tensors, embeddings, hidden), strict=True):
        error = (torch.cat(found) - expected).float().norm() / expected.float().norm()
        assert float(error) < CLOSE[dtype]


def test_over_the_kernels_of_gpus_it_computes_the_same(tmp_path):
    """As the fused decoder attends: 9 rows of one sequence, whose keys and values are written before they are read."""
    head = open_head(write_head(tmp_path)).to(DEVICE)
    embeddings, hidden = torch.randn(9, 32, device=DEVICE), torch.randn(9, 32, device=DEVICE)
    keys, values = (torch.full((16, size), torch.nan, device=DEVICE) for size in head.geometry.row_sizes)
    rotary, heads = head.rotary(16), head.shape.num_heads
    at = torch.arange(9, device=DEVICE)
    blocks = torch.tensor([[3, 1, 2]], dtype=torch.int32, device=DEVICE)
    slots = blocks[0, at // 4].long() * 4 + at % 4
    group = KernelGroup(slots, DecodeTable(blocks.repeat(9, 1), (at + 1).int()), [], 0)

    def attend(qkv, positions):
        turned = rotate_and_store(qkv, None, None, 0.0, rotary.cos_sin, positions, slots, keys, values, heads)
        query, key = turned[:, :heads], turned[:, heads:]
        value = qkv[:, turned.shape[1] * turned.shape[2] :].view_as(key)
        pools = keys, values, 4
        return attend_stored(group, query, key, value, *pools, Extras(head.scaling), FlashAttention()).flatten(1)

    made = head(embeddings, hidden, at, attend)
    for found, expected in zip(made, published(make_tensors(), embeddings.cpu(), hidden.cpu()), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_row_that_it_drafted_stands_in_for_the_base_s(tmp_path):
    head = open_head(write_head(tmp_path))
    attend_of, embeddings, first = paged(head, PlainOps), torch.randn(3, 32), torch.randn(1, 32)
    rows, hidden = [], first
    for place in range(3):
        rows.append(hidden)
        hidden, logits = head(embeddings[place][None], hidden, torch.tensor([place]), attend_of(place, place + 1))
    expected, of_all = published(make_tensors(), embeddings, torch.cat(rows))
    torch.testing.assert_close(hidden, expected[-1:], rtol=1e-4, atol=1e-5)
    assert head.likeliest(logits).item() == 2 * int(of_all[-1].argmax()) + 7


def test_rows_come_of_those_that_are_wanted_alone(tmp_path):
    head = open_head(write_head(tmp_path))
    embeddings, hidden, at = torch.randn(5, 32), torch.randn(5, 32), torch.arange(5)
    every = head(embeddings, hidden, at, paged(head, PlainOps)(0, 5))
    some = head(embeddings, hidden, at, paged(head, PlainOps)(0, 5), torch.tensor([4, 1]))
    for found, expected in zip(some, every, strict=True):
        torch.testing.assert_close(found, expected[[4, 1]])


def test_what_is_written_is_what_was_read(tmp_path):
    tensors = make_tensors() | {"embed_tokens.weight": torch.randn(50, 32)}
    head = open_head(write_head(tmp_path, tensors))
    assert head.tensors().keys() == tensors.keys()
    assert all(torch.equal(own, tensors[name]) for name, own in head.tensors().items())
    assert torch.equal(head.embeddings, tensors["embed_tokens.weight"])


def test_a_head_that_says_no_layers_reads_those_of_the_published_ones(tmp_path):
    assert read_eagle(write_head(tmp_path), BASE).shape.taps == (1, 3, 4)
    told = {"eagle_aux_hidden_state_layer_ids": [0, 4, 7]}
    assert read_eagle(write_head(tmp_path, eagle_config=told), BASE).shape.taps == (0, 4, 7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, "config.json: hidden_size is 64, the model's 32"),
        ({"vocab_size": 60}, "vocab_size is 60, the model's 50"),
        ({"target_hidden_size": 48}, "target_hidden_size is 48, the model's 32"),
        ({"architectures": ["Eagle3Speculator"]}, "architectures is Eagle3Speculator"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"norm_before_residual": True}, "norm_before_residual is True"),
        ({"hidden_size": "wide"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"draft_vocab_size": 51}, "draft_vocab_size 51 is more than vocab_size 50"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 8]}},
            r"are \[0, 3, 8\]; 3 of the model's 0 to 7",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 1]}}, r"are \[5, 1\]"),
        ({"intermediate_size": 41}, r"midlayer.mlp.down_proj.weight is \[32, 40\], and by config.json \[32, 41\]"),
        ({"draft_vocab_size": 19}, r"d2t is \[20\], and by config.json \[19\]"),
    ],
    ids=str,
)
def test_a_configuration_of_another_base_or_layout_is_refused_by_its_field(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        read_eagle(write_head(tmp_path, **changes), BASE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fc.weight": None}, "lacks 1 of an EAGLE-3 head's tensors, fc.weight among them"),
        ({"d2t": None}, "lacks d2t"),
        ({"d2t": torch.full((20,), 40)}, "d2t makes draft id 10 token 50; the model's are 0 to 49"),
        ({"d2t": torch.full((20,), -1)}, "d2t makes draft id 0 token -1"),
        ({"d2t": torch.zeros(20)}, "d2t is of torch.float32; integers are expected"),
        ({"t2d": torch.zeros(50, dtype=torch.bool)}, "d2t and t2d disagree about token 7"),
        ({MID + "self_attn.q_norm.weight": torch.ones(16)}, "has 1 tensors that an EAGLE-3 head has not"),
        ({"lm_head.weight": torch.ones(21, 32)}, r"model.safetensors: lm_head.weight is \[21, 32\]"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_weights_that_do_not_fit_are_refused_by_their_name(tmp_path, change, said):
    tensors = {name: own for name, own in (make_tensors() | change).items() if own is not None}
    with pytest.raises(ConfigError, match=said):
        read_eagle(write_head(tmp_path, tensors), BASE)


def test_files_that_are_missing_or_broken_are_refused_by_their_name(tmp_path):
    with pytest.raises(ConfigError, match="config.json can't be read: No such file"):
        read_eagle(tmp_path, BASE)
    folder = write_head(tmp_path / "head")
    (folder / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ConfigError, match="head/model.safetensors is corrupted"):
        read_eagle(folder, BASE)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="head has no model.safetensors"):
        read_eagle(folder, BASE)


def test_a_head_of_another_width_than_its_base_needs_embeddings_of_its_own(tmp_path):
    base = SimpleNamespace(hidden_size=48, vocab_size=50, num_hidden_layers=8)
    tensors = make_tensors() | {"fc.weight": torch.randn(32, 144)}
    with pytest.raises(ConfigError, match=r"lacks embed_tokens.weight"):
        read_eagle(write_head(tmp_path, tensors, target_hidden_size=48), base)
    tensors["embed_tokens.weight"] = torch.randn(50, 32)
    head = EagleHead.of(read_eagle(write_head(tmp_path, tensors, target_hidden_size=48), base), torch.float32)
    assert head.fuse(torch.randn(2, 144)).shape == (2, 32)
