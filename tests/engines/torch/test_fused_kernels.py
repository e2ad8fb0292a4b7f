"""The fused decoder's kernels equal plain torch: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bireme.logits.filters import draw_row
from bireme.logits.random import draw_key
from bireme.logits.rows import Row
from bireme.logits.sampler import NOTHING_LEFT
from bireme.messages import SamplingParams

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.engines.torch.forward import decoder_weights
from bireme.engines.torch.forward.flight import Flight
from bireme.engines.torch.geometry import ClampedGate
from bireme.engines.torch.kernels import (
    chunk_attention,
    decode_attention,
    draft_attention,
    draw,
    experts,
    few_rows_linear,
    one_row_linear,
    rotary,
    row_wise,
    step_begin,
)
from tests.engines.torch import kernel_references as references

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, NUM_KV, BLOCK_SIZE, BLOCKS = 6, 2, 8, 160
close = torch.testing.assert_close


@pytest.fixture
def randn():
    rng = torch.Generator(DEVICE).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=rng, device=DEVICE)


@pytest.mark.parametrize(("is_gated", "is_gelu"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_the_product_of_one_row_and_of_a_few_equals_plain_torch(randn, rows, is_gated, is_gelu):
    x, weight = randn(rows, 96), randn(144 if is_gated else 72, 96)
    add_to = None if is_gated else randn(rows, 72)
    given = (x, weight, None if is_gated else randn(72), randn(96), 1e-5, is_gated, is_gelu, add_to)
    function, reference = one_row_linear.one_row_linear, references.one_row_linear
    if rows > 1:
        given = (x, weight, is_gated, is_gelu, add_to)
        function, reference = few_rows_linear.few_rows_linear, references.few_rows_linear
    expected = reference(*given)
    close(function(*given), expected, atol=2e-4, rtol=1e-4)


def test_what_is_done_row_by_row_equals_plain_torch(randn):
    x, weight, add_to = randn(5, 72), randn(72), randn(5, 72)
    close(row_wise.rms_norm(x, weight, 1e-6), references.rms_norm(x, weight, 1e-6))
    expected = references.rms_norm(x, weight, 1e-6, add_to)
    close(row_wise.rms_norm(x, weight, 1e-6, add_to), expected)
    close(add_to, expected)
    for is_gelu in (False, True):
        close(row_wise.gate(40 * x, is_gelu), references.gate(40 * x, is_gelu))
    expected = references.cap(50 * x, 30.0)
    close(row_wise.cap(50 * x, 30.0), expected)


@pytest.mark.parametrize("is_normed", [False, True])
def test_the_likeliest_experts_are_chosen_as_in_plain_torch(randn, is_normed):
    logits = 3 * randn(5, 6)
    close(experts.choose_experts(logits, 3, is_normed), references.choose_experts(logits, 3, is_normed))
    logits[1, 2], logits[2, :] = float("nan"), float("inf")
    chosen, shares = experts.choose_experts(logits, 3, is_normed)
    assert ((chosen >= 0) & (chosen < 6)).all() and shares[1:3].isnan().all()


@pytest.mark.parametrize(("rows", "is_gelu"), [(1, False), (3, True), (40, False), (100, True)])
def test_the_products_of_experts_equal_plain_torch(randn, rows, is_gelu):
    num_experts, top_k, size, inner = 6, 2, 40, 24  # of 100 rows larger tiles; the last expert is never chosen
    x, gate_up, down = randn(rows, size), randn(num_experts, 2 * inner, size), randn(num_experts, size, inner)
    logits = randn(rows, num_experts)
    logits[:, -1] = -100
    chosen, shares = experts.choose_experts(logits, top_k, True)
    tiles, of = experts.group_pairs(chosen, num_experts), chosen.view(-1)
    gated = experts.experts_linear(x, gate_up, tiles, is_gated=True, is_gelu=is_gelu)
    close(gated, references.experts_linear(x, gate_up, of, True, is_gelu), atol=1e-4, rtol=1e-4)
    found = experts.experts_linear(gated, down, tiles)
    close(found, references.experts_linear(gated, down, of), atol=1e-4, rtol=1e-4)
    expected = references.add_shares(found, shares, x)
    experts.add_shares(found, shares, x)
    close(x, expected)


@pytest.mark.parametrize("is_gelu", [False, True])
def test_the_experts_of_one_row_equal_plain_torch(randn, is_gelu):
    x, norm, gate_up, down = randn(1, 40), randn(40), randn(6, 48, 40), randn(6, 40, 24)
    chosen, shares = experts.choose_experts(randn(1, 6), 3, True)
    given = (x, norm, 1e-5, chosen, shares, gate_up, down, is_gelu)
    expected = references.add_row_experts(*given)
    experts.add_row_experts(*given)
    close(x, expected, atol=1e-4, rtol=1e-4)


CLAMP = ClampedGate(limit=2.0, alpha=1.702)


@pytest.mark.parametrize("rows", [3, 40, 100])
def test_the_products_of_experts_with_a_bias_and_a_clamped_gate_equal_plain_torch(randn, rows):
    x, gate_up, down = randn(rows, 40), randn(6, 48, 40), randn(6, 40, 24)
    biases = randn(6, 48), randn(6, 40)
    chosen, _ = experts.choose_experts(randn(rows, 6), 2, True)
    tiles, of = experts.group_pairs(chosen, 6), chosen.view(-1)
    gated = experts.experts_linear(x, gate_up, tiles, True, False, biases[0], CLAMP)
    expected = references.experts_linear(x, gate_up, of, True, False, biases[0], CLAMP)
    close(gated, expected, atol=1e-4, rtol=1e-4)
    found = experts.experts_linear(gated, down, tiles, bias=biases[1])
    close(found, references.experts_linear(gated, down, of, bias=biases[1]), atol=1e-4, rtol=1e-4)


def test_one_row_of_experts_with_a_bias_and_a_clamped_gate_equals_plain_torch(randn):
    x, norm, gate_up, down = randn(1, 40), randn(40), randn(6, 48, 40), randn(6, 40, 24)
    chosen, shares = experts.choose_experts(randn(1, 6), 3, True)
    given = (x, norm, 1e-5, chosen, shares, gate_up, down, False, randn(6, 48), randn(6, 40), CLAMP)
    expected = references.add_row_experts(*given)
    experts.add_row_experts(*given)
    close(x, expected, atol=1e-4, rtol=1e-4)
    gate_up[int(chosen[0, 0])] = float("nan")
    experts.add_row_experts(*given)
    assert x.isnan().all()  # a clamp hides nothing


@pytest.mark.parametrize("rows", [5, 90])
def test_pairs_of_an_expert_share_tiles_and_each_pair_has_one(randn, rows):
    chosen, _ = experts.choose_experts(randn(rows, 8), 3, True)
    tiles = experts.group_pairs(chosen, 8)
    of = tiles.pairs.view(-1, tiles.rows)[tiles.experts != experts.UNUSED]
    used = tiles.experts[tiles.experts != experts.UNUSED]
    assert sorted(of[of < tiles.num_pairs].tolist()) == list(range(3 * rows))
    for expert, pairs in zip(used.tolist(), of, strict=True):
        assert (chosen.view(-1)[pairs[pairs < tiles.num_pairs].long()] == expert).all()
    assert len(used) == sum(-(-count // tiles.rows) for count in chosen.view(-1).bincount().tolist())


def a_rotary(randn, size, has_norms):
    norms = (randn(size), randn(size)) if has_norms else (None, None)
    return decoder_weights.Rotary(randn(300, size), 1e-6, *norms)


@pytest.mark.parametrize(("size", "has_norms"), [(16, False), (24, True)])
def test_keys_and_values_are_turned_and_stored_as_in_plain_torch(randn, size, has_norms):
    qkv, how = randn(7, (HEADS + 2 * NUM_KV) * size), a_rotary(randn, size, has_norms)
    positions, slots = torch.arange(40, 47, device=DEVICE), torch.arange(70, 0, -10, device=DEVICE)
    results = []
    for function in (rotary.rotate_and_store, references.rotate_and_store):
        keys, values = torch.zeros(80, NUM_KV * size, device=DEVICE), torch.zeros(80, NUM_KV * size, device=DEVICE)
        given = (how.q_norm, how.k_norm, how.eps, how.cos_sin, positions, slots, keys, values, HEADS)
        results.append((function(qkv, *given), keys, values))
    close(*results)


@pytest.mark.parametrize(
    ("size", "has_norms", "window", "softcap", "has_sinks"),
    [
        (16, False, 0, 0.0, True),
        (16, False, 33, 2.0, False),
        (24, True, 33, 0.0, True),
        (24, True, 0, 0.5, False),
    ],
)
def test_a_decode_step_attends_as_plain_torch(randn, size, has_norms, window, softcap, has_sinks):
    qkv, how = randn(4, (HEADS + 2 * NUM_KV) * size), a_rotary(randn, size, has_norms)
    slots, positions = (np.array(values, dtype=np.int32) for values in ([2, 0, 3, 1], [0, 70, 133, 256]))
    most = decode_attention.most_parts(NUM_KV)
    tile = decode_attention.tile_of(torch.float32, size)
    parts = decode_attention.cut_into_parts(slots, positions, most, most, window, tile)
    assert parts[:, 6].max() > 1  # a row of several parts
    table = torch.randperm(BLOCKS, device=DEVICE).view(4, 40).int()
    scratch = decode_attention.Scratch.make(4, HEADS, NUM_KV, size, torch.device(DEVICE))
    rows = randn(BLOCKS * BLOCK_SIZE, NUM_KV * size), randn(BLOCKS * BLOCK_SIZE, NUM_KV * size)
    sinks, results = 3 * randn(HEADS) if has_sinks else None, []
    for function in (decode_attention.decode_attention, references.decode_attention):
        keys, values = rows[0].clone(), rows[1].clone()
        told = torch.from_numpy(parts).to(DEVICE)
        settings = (BLOCK_SIZE, HEADS, 0.3, window, softcap, sinks)
        out = function(qkv, how, told, table, keys, values, scratch, *settings)
        results.append((out, keys, values))
    close(*results)
    assert not scratch.counters.any()


@pytest.mark.parametrize(
    ("size", "window", "softcap", "has_sinks"),
    [(16, 0, 0.0, True), (16, 33, 2.0, False), (24, 33, 0.0, True), (24, 0, 0.5, False)],
)
def test_chunks_of_prompts_attend_as_plain_torch(randn, size, window, softcap, has_sinks):
    chunks = [(0, 20, 2, 0), (20, 1, 0, 70), (21, 37, 3, 133)]  # first row, rows, slot, position; row 58 is nobody's
    tokens = chunk_attention.tile_tokens(HEADS, NUM_KV)
    tiles = np.concatenate(
        [np.zeros((2, 4), np.int32), *(chunk_attention.cut_into_tiles(*one, tokens) for one in chunks)]
    )
    assert sorted(tiles[:, 1])[-1] == tokens and tiles[:, 1].sum() == 58
    query = randn(59, HEADS + NUM_KV, size)
    keys, values = (randn(BLOCKS * BLOCK_SIZE, NUM_KV * size) for _ in range(2))
    table = torch.randperm(BLOCKS, device=DEVICE).view(4, 40).int()
    out = torch.zeros(59, HEADS * size, device=DEVICE)
    told = torch.from_numpy(tiles).to(DEVICE)
    sinks = 3 * randn(HEADS) if has_sinks else None
    settings = (BLOCK_SIZE, HEADS, 0.3, window, softcap, sinks)
    chunk_attention.chunk_attention(query, told, table, keys, values, out, *settings)
    expected = torch.zeros_like(out)
    for first, count, slot, position in chunks:
        rows = slice(first, first + count)
        lengths = torch.arange(position, position + count, device=DEVICE) + 1
        seen = (query[rows, :HEADS], keys, values, table[slot].expand(count, -1), lengths, BLOCK_SIZE, NUM_KV, 0.3)
        expected[rows] = references.paged_decode(*seen, window, softcap or None, sinks).flatten(1)
    close(out, expected)


@pytest.mark.parametrize("most_parts", [1, 4, 16])
@pytest.mark.parametrize(
    ("size", "window", "softcap", "has_sinks"), [(16, 0, 0.0, False), (72, 20, 0.0, True), (16, 50, 2.0, False)]
)
def test_rows_of_a_draft_attend_together_as_plain_torch(randn, size, window, softcap, has_sinks, most_parts):
    slots, positions = np.array([2, 0, 3, 1], np.int32), np.array([0, 191, 130, 63], np.int32)
    drafts = np.array([[11, 2], [4, 7], [0, 0], [13, 3]], np.int32)  # not in the order of sequences; row 16 is nobody's
    runs = draft_attention.Runs.of(slots, positions, drafts, most := 4)
    assert runs.counts.tolist() == [3, 4, 1, 4, 4] and runs.counts.sum() == 16
    tile = decode_attention.tile_of(torch.float32, size)
    parts = draft_attention.cut_runs(runs, 8 + 4 * most_parts, most_parts, window, tile)
    assert parts[:, 6].max() == min(most_parts, parts[:, 6].max()) and (parts[:, 6] > 1).any() == (most_parts > 1)
    query, scratch = (
        randn(17, HEADS + NUM_KV, size),
        decode_attention.Scratch.make(17, HEADS, NUM_KV, size, torch.device(DEVICE)),
    )
    keys, values = (randn(BLOCKS * BLOCK_SIZE, NUM_KV * size) for _ in range(2))
    table = torch.randperm(BLOCKS, device=DEVICE).view(4, 40).int()
    out, expected = torch.zeros(2, 17, HEADS * size, device=DEVICE)
    sinks = 3 * randn(HEADS) if has_sinks else None
    settings = (BLOCK_SIZE, HEADS, 0.3, window, softcap, sinks)
    told = torch.from_numpy(parts).to(DEVICE)
    for _ in range(2):  # the counters are zero again afterwards
        draft_attention.draft_attention(query, told, table, keys, values, scratch, out, most, *settings)
    for at, (slot, position, (begin, length)) in enumerate(zip(slots, positions, drafts, strict=True)):
        rows = [at, *range(begin, begin + length)]
        lengths = torch.arange(position, position + len(rows), device=DEVICE) + 1
        seen = (query[rows, :HEADS], keys, values, table[slot].expand(len(rows), -1), lengths, BLOCK_SIZE, NUM_KV, 0.3)
        expected[rows] = references.paged_decode(*seen, window, softcap or None, sinks).flatten(1)
    close(out, expected)


def test_rows_are_cut_into_parts_that_cover_them_once():
    positions = np.random.default_rng(0).integers(0, 5000, 40).astype(np.int32)
    parts = decode_attention.cut_into_parts(np.arange(40, dtype=np.int32), positions, 56, 32, 1000, 64)
    for row, position in enumerate(positions):
        own = sorted(parts[(parts[:, 0] == row) & (parts[:, 6] > 0)].tolist(), key=lambda part: part[5])
        tiles = [tile for part in own for tile in range(part[3], part[4])]
        assert tiles == list(range(max(0, position - 999) // 64, -(-position // 64)))
        assert [part[5] for part in own] == list(range(own[0][6]))


PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.5, "top_p": 1e-9},
    {"temperature": 5.0, "top_p": 0.999, "top_k": 1000},
]


def draw_all(logits, rows, num_prompt=10):
    """Return the tokens that the kernel chooses, in slots from the last to the first."""
    count = len(rows)
    slots = list(range(count))[::-1]
    steps = torch.tensor([[slot, num_prompt + row.num_output - 1, 0] for slot, row in zip(slots, rows, strict=True)])
    requests = torch.from_numpy(
        np.stack([draw.request_columns(rows[slots[slot]], num_prompt) for slot in range(count)])
    )
    tokens, last = torch.zeros(2, count, dtype=torch.int32, device=DEVICE)
    draw.draw(logits, steps.int().to(DEVICE), requests.to(DEVICE), last, tokens, logits.shape[1])
    assert last.flip(0).equal(tokens)
    return tokens.tolist()


@pytest.mark.parametrize("size", [40, 1000, 20_017])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_drawn_as_the_sampler_draws_them(randn, dtype, size):
    count = len(PARAMS) * (40 if DEVICE == "cuda" else 1)
    logits = (3 * randn(count, size)).to(dtype)
    logits[1::3, 7:11] += 9  # one token or a few are likely
    logits[::4, ::2] = float("-inf")
    rows = [
        Row(SamplingParams(seed=2**63 + 7919 * at, **PARAMS[at % len(PARAMS)]), [1], [3] * at, (), size)
        for at in range(count)
    ]
    alone = [
        draw_row(own.float().cpu().numpy().copy(), row, draw_key(row.seed, row.num_output))
        for own, row in zip(logits, rows, strict=True)
    ]
    assert draw_all(logits, rows) == alone
    assert draw.draw_rows(logits.float(), rows) == alone


def test_tokens_chosen_again_are_the_sampler_s_and_other_rows_keep_theirs(randn):
    size, rows = 300, [Row(SamplingParams(seed=5 + at, **PARAMS[at % 3]), [1], [3] * at, (), 300) for at in range(4)]
    tokens, last, told = (torch.zeros(count, dtype=torch.int32, device=DEVICE) for count in (4, 5, 1))
    requests = torch.from_numpy(np.stack([draw.request_columns(row, 10) for row in [*rows, rows[0]]])).to(DEVICE)
    logits, edited = randn(4, size), randn(3, size)
    state = SimpleNamespace(tokens=tokens, last=last, requests=requests, logits=logits, told=told)
    tokens.copy_(torch.tensor([7, 8, 9, draw.UNUSABLE], dtype=torch.int32))
    heard = torch.zeros(4, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    flight = Flight.depart(state, heard)
    edited[1:] = float("-inf")
    chosen_from = edited[0].cpu().numpy().copy()
    flight.choose_again(edited, [(2, 2, rows[2]), (0, 0, rows[0]), (3, 3, rows[3])])
    flight.send()
    expected = draw_row(chosen_from, rows[2], draw_key(rows[2].seed, 2))
    assert flight.read() == [NOTHING_LEFT, 8, expected, draw.UNUSABLE]
    assert flight.ids_of(torch.tensor([0, 2], device=DEVICE)).tolist() == [0, expected]
    assert last[2] == expected


def test_a_greedy_row_takes_the_likeliest_token_and_one_with_unusable_logits_none(randn):
    logits, rows = randn(4, 700), [Row(SamplingParams(temperature=0.0), [1], (), (), 700)] * 4
    assert draw_all(logits, rows) == logits.argmax(-1).tolist()
    logits[1, 5], logits[2, 6], logits[3] = float("nan"), float("inf"), float("-inf")
    assert draw_all(logits, rows)[1:] == [draw.UNUSABLE] * 3


def test_a_step_begins_with_tokens_of_the_one_before_or_of_drafts_and_takes_in_new_blocks(randn):
    rows = [[3, 4, -1, 2, 11, -1, 0], [1, 0, 13, -1, 0, 8, 17], *([1, 1 + at, -2 - at, -1, 0, -1, 0] for at in (2, 0))]
    steps = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    last, embeddings = torch.arange(5, 10, dtype=torch.int32, device=DEVICE), randn(20, 48)
    drafted = torch.tensor([12, 7, draw.UNUSABLE], dtype=torch.int32, device=DEVICE)
    tables = [torch.zeros(2, 5, 9, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    expected = references.begin_step(steps, tables[0], last, embeddings, drafted)
    close(step_begin.begin_step(steps, tables[1], last, embeddings, drafted=drafted), expected)
    close(step_begin.begin_step(steps[:2], tables[1], last, embeddings, 8.5), expected[:2] * 8.5)
    assert tables[0].equal(tables[1]) and tables[0].any()
