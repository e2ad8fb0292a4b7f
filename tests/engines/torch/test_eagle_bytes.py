"""What a head's pass is counted to take is what torch allocates in one, and what it reads is counted beside steps."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bireme.engines.torch.forward.eagle_head import EagleHead
from bireme.engines.torch.weights.eagle_bytes import KEPT_BYTES, eagle_bytes
from bireme.engines.torch.weights.eagle_checkpoint import EagleShape

SHAPE = EagleShape(
    hidden_size=256, base_hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=2, head_size=32,
    vocab_size=2000, draft_vocab_size=500, eps=1e-5, taps=(0, 1, 2), rotary={},
)  # fmt: skip
LIMITS = SimpleNamespace(max_num_tokens=512, max_batch_size=8, max_seq_len=512)


class Allocated(TorchDispatchMode):
    """Counts the bytes of what operators make while it lives."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        for one in tree_leaves(made):
            if torch.is_tensor(one) and (at := one.untyped_storage().data_ptr()) not in self.known | given:
                self.known.add(at)
                self.now += (size := one.untyped_storage().nbytes())
                weakref.finalize(one.untyped_storage(), self.freed, at, size)
        self.peak = max(self.peak, self.now)
        return made

    def freed(self, at, size):
        self.known.discard(at)
        self.now -= size


def a_pass(head, tapped):
    hidden = head.fuse(torch.cat(tapped, -1))

    def attend(qkv, positions):
        query, key, value = qkv.view(1, len(qkv), -1, 32).transpose(1, 2).split((8, 2, 2), 1)
        query, key = (torch.cat([-heads.float(), heads.float()], -1)[..., :32].to(qkv.dtype) for heads in (query, key))
        prefix = key.clone(), value.clone()
        found = torch.nn.functional.scaled_dot_product_attention(query, *prefix, is_causal=True, enable_gqa=True)
        return found.transpose(1, 2).flatten(2)[0]

    _, logits = head(torch.zeros_like(hidden), hidden, torch.arange(len(hidden)), attend, torch.arange(8))
    whole = torch.full((8, head.shape.vocab_size), -torch.inf)
    whole[:, head.base_ids] = logits.float()
    return whole.log_softmax(-1)


@pytest.mark.parametrize("vocab", [2000, 200_000], ids=["rows", "logits"])
def test_a_pass_takes_what_it_is_counted_to_take(vocab):
    shape = dataclasses.replace(SHAPE, vocab_size=vocab)
    head = EagleHead(shape, torch.bfloat16).requires_grad_(False)
    tapped = [torch.zeros(512, 256, dtype=torch.bfloat16) for _ in range(3)]
    with torch.inference_mode(False), torch.no_grad(), Allocated() as allocated:
        a_pass(head, tapped)
    counted = eagle_bytes(shape.widths, LIMITS, 2)
    assert counted.largest_pass == pytest.approx(allocated.peak, rel=0.3)
    assert counted.tapped == sum(each.nbytes for each in tapped) + KEPT_BYTES
    assert counted.beside(1 << 40) == (1 << 40) + counted.tapped
