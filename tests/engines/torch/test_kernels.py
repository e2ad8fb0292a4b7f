"""The GPU's kernels equal plain torch: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engines.torch.torch_harness import Harness, make_prompts, request

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.engines.torch import kernels
from bireme.engines.torch.forward import decoder_weights
from bireme.engines.torch.kernels.packed_prefill import num_parts, packed_prefill
from bireme.engines.torch.kernels.paged_decode import paged_decode
from bireme.engines.torch.pools.row_copies import move_rows
from tests.engines.torch import kernel_references as references

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = 40
# heads, key/value heads, sizes of keys and values, block size, window, softcap, has sinks
SHAPES = [
    pytest.param(4, 2, 16, 16, 8, 0, None, False, id="grouped"),
    pytest.param(4, 1, 24, 16, 16, 20, None, False, id="window, sizes that differ"),
    pytest.param(4, 4, 64, 64, 32, 0, 5.0, False, id="softcap"),
    pytest.param(6, 2, 16, 8, 8, 33, None, True, id="window and sinks"),
]


@pytest.fixture
def rng():
    return torch.Generator(DEVICE).manual_seed(0)


def pools(rng, num_kv, size, value_size, block_size):
    shape = {"generator": rng, "device": DEVICE}
    rows = BLOCKS * block_size
    return torch.randn(rows, num_kv * size, **shape), torch.randn(rows, num_kv * value_size, **shape)


@pytest.mark.parametrize(
    ("heads", "num_kv", "size", "value_size", "block_size", "window", "softcap", "has_sinks"), SHAPES
)
def test_decode_over_a_block_table_equals_plain_torch(
    rng, heads, num_kv, size, value_size, block_size, window, softcap, has_sinks
):
    keys, values = pools(rng, num_kv, size, value_size, block_size)
    query = torch.randn(heads, 3, size, generator=rng, device=DEVICE).transpose(0, 1)
    lengths = torch.tensor([1, 70, 133], dtype=torch.int32, device=DEVICE)
    table = torch.randint(1, BLOCKS, (3, 20), generator=rng, device=DEVICE, dtype=torch.int32)
    sinks = torch.randn(heads, generator=rng, device=DEVICE) if has_sinks else None
    given = (query, keys, values, table, lengths, block_size, num_kv, 0.3, window, softcap, sinks)
    torch.testing.assert_close(paged_decode(*given), references.paged_decode(*given))


@pytest.mark.parametrize(
    ("heads", "num_kv", "size", "value_size", "block_size", "window", "softcap", "has_sinks"), SHAPES
)
@pytest.mark.parametrize("parts", [1, 3])
def test_prefill_behind_prefixes_equals_plain_torch(
    rng, heads, num_kv, size, value_size, block_size, window, softcap, has_sinks, parts
):
    keys, values = pools(rng, num_kv, size, value_size, block_size)
    query = torch.randn(heads, 80, size, generator=rng, device=DEVICE).transpose(0, 1)
    own = torch.tensor([0, 3, 73, 80], dtype=torch.int32, device=DEVICE)  # a whole prompt, then two behind prefixes
    seen = torch.tensor([0, 3, 103, 120], dtype=torch.int32, device=DEVICE)
    rows = torch.randint(0, len(keys), (120,), generator=rng, device=DEVICE)
    sinks = torch.randn(heads, generator=rng, device=DEVICE) if has_sinks else None
    given = (query, keys, values, rows, own, seen, 70, num_kv, 0.3, window, softcap, sinks)
    torch.testing.assert_close(packed_prefill(*given, parts), references.packed_prefill(*given))


@pytest.mark.parametrize(
    ("heads", "num_kv", "size", "value_size", "block_size", "window", "softcap", "has_sinks"), SHAPES
)
@pytest.mark.parametrize("parts", [1, 3])
def test_prefill_leaves_zeros_behind_the_chunks_where_it_is_padded(
    rng, heads, num_kv, size, value_size, block_size, window, softcap, has_sinks, parts
):
    keys, values = pools(rng, num_kv, size, value_size, block_size)
    query = torch.randn(90, heads, size, generator=rng, device=DEVICE)
    query[70:] = float("nan")
    own, seen = (torch.tensor([0, last], dtype=torch.int32, device=DEVICE) for last in (70, 100))
    rows = torch.randint(0, len(keys), (300,), generator=rng, device=DEVICE)
    sinks = torch.randn(heads, generator=rng, device=DEVICE) if has_sinks else None
    given = (keys, values, rows, own, seen, 90, num_kv, 0.3, window, softcap, sinks)
    found = packed_prefill(query, *given, parts=parts, is_padded=True)
    torch.testing.assert_close(found[:70], references.packed_prefill(query[:70], *given))
    assert not found[70:].any()


@pytest.mark.parametrize(
    ("num_chunks", "num_tokens", "num_keys", "expected"),
    [(1, 32, 8192, 8), (1, 200, 8192, 2), (1, 2048, 8192, 1), (1, 128, 128, 1), (1, 1, 700, 2), (64, 32, 8192, 1)],
)
def test_few_tokens_behind_many_are_cut_into_parts_until_the_gpu_is_full(num_chunks, num_tokens, num_keys, expected):
    assert num_parts(num_chunks, 32, num_tokens, num_keys) == expected


@pytest.mark.skipif(DEVICE == "cpu", reason="sizes for a GPU")
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_question_behind_a_long_prefix_equals_plain_torch_in_bfloat16(rng, size):
    keys, values = (torch.randn(9000, 8 * size, generator=rng, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(40, 32, size, generator=rng, device=DEVICE, dtype=torch.bfloat16)
    own, seen = (torch.tensor([0, last], dtype=torch.int32, device=DEVICE) for last in (40, 8240))
    rows = torch.randperm(9000, generator=rng, device=DEVICE)[:8240]
    given = (query, keys, values, rows, own, seen, 40, 8, size**-0.5)
    found = packed_prefill(*given, parts=num_parts(1, 32, 40, 8240)).float()
    expected = references.packed_prefill(*given).float()
    assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.usefixtures("few_programs")
def test_an_engine_that_runs_on_the_kernels_equals_generate(tiny, monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    monkeypatch.setattr(decoder_weights, "FAMILIES", ())
    model, prompt = tiny("gemma3"), make_prompts(12)[0]
    with Harness(model.path, max_num_tokens=8, tokens_per_block=8, max_batch_size=1) as engine:
        assert engine.core._parts.forward.modules.uses_kernels
        assert engine.run([request(prompt, 2)]) == model.expect([prompt], 2)
        longer = [*prompt, 7]  # behind a block that is reused
        assert engine.run([request(longer, 1)]) == model.expect([longer], 1)


@pytest.mark.parametrize("most", [1, 3, 64, 100, 256])
def test_graphs_are_made_for_few_batch_sizes_and_fill_up_few_rows(most):
    from bireme.engines.torch.forward.decode_graphs import bucket_sizes

    sizes = bucket_sizes(most)
    assert sizes[0] == 1 and sizes[-1] == most and len(sizes) <= 20
    assert all(after - before <= max(8, before // 2) for before, after in zip(sizes, sizes[1:], strict=False))


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(torch.bfloat16, (64, 24)), (torch.uint8, (24, 8)), (torch.uint8, (5, 30)), (torch.int64, (3000,))],
)
def test_rows_copied_by_address_are_those_that_were_asked_for(dtype, sizes):
    sources = [torch.randint(1, 100, (50, size), device=DEVICE).to(dtype) for size in sizes]
    whole = torch.zeros(40, sum(sizes), dtype=dtype, device=DEVICE)
    targets = whole.split(sizes, 1)  # rows with a gap between them
    read, written = np.array([3, 9, 40, 2, 7]), np.array([0, 39, 5, 6, 7])
    move_rows(sources, targets, read, written, uses_kernel=True)
    expected = torch.zeros_like(whole)
    move_rows(sources, expected.split(sizes, 1), read, written, uses_kernel=False)
    assert torch.equal(whole, expected) and int(whole[written].count_nonzero()) == 5 * sum(sizes)
