"""Programs of a grid that the interpreter runs at once do what each does alone, also where they part."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.engines.torch import whole_grids

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted")
LENGTHS = torch.tensor([3, 0, 5, 3, 1, 5, 0, 2], dtype=torch.int32)


@triton.jit
def _sums_kernel(lengths, values, sums, odd):
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths + program)
    tl.store(sums + program, tl.load(sums + program) + 100.0)  # once, however often programs part
    total = 0.0
    for at in range(length):
        total += tl.load(values + at)
    tl.store(sums + program, tl.load(sums + program) + total)
    if length % 2 == 1:
        tl.store(odd + program, tl.load(odd + program) + length)


@triton.jit
def _last_kernel(values, parts, counter, out):
    program = tl.program_id(0)
    at = tl.arange(0, 4)
    tl.store(parts + program, tl.sum(tl.load(values + program * 4 + at)))
    if tl.atomic_add(counter, 1) == tl.num_programs(0) - 1:
        tl.store(out, tl.load(out) + tl.sum(tl.load(parts + tl.arange(0, 8))))
        tl.store(counter, 0)


@triton.jit
def _halves_kernel(sought, out):
    program = tl.program_id(0)
    low, high = 0, 64
    while high - low > tl.load(sought + program) % 3 + 1:
        middle = (low + high) // 2
        if middle > tl.load(sought + program):
            high = middle
        else:
            low = middle
    tl.store(out + program, low)


@triton.jit
def _shapes_kernel(values, out, place):
    N: tl.constexpr = 8
    program = tl.program_id(0)
    at = tl.arange(0, N)
    block = tl.load(values + program * N * N + at[:, None] * N + at[None, :])
    turned = tl.permute(block, (1, 0))
    first, second = tl.split(tl.reshape(block, (N, N // 2, 2)))
    joined = tl.reshape(tl.join(second, first), (N, N))
    product = tl.dot(block, turned, input_precision="ieee")
    largest, where = tl.max(block, axis=1, return_indices=True)
    told = tl.cumsum(tl.sum(joined * product, axis=0), 0) + largest + tl.max(block) + tl.min(turned, axis=0)
    told = tl.where(at < program, told, tl.sum(block, axis=1, keep_dims=True).reshape(N))
    tl.store(out + program * N + at, told, mask=at < N - 1)
    tl.store(place + program * N + at, where)


@triton.jit
def _gather_kernel(values, out):
    at = tl.arange(0, 4)
    tl.store(out + at, tl.gather(tl.load(values + at), 3 - at, 0))


def alone(monkeypatch):
    monkeypatch.setattr(whole_grids, "_MOST_AT_ONCE", 1)


@pytest.fixture
def starts(monkeypatch):
    """The numbers of programs that began together, a launch's or a group's."""
    found, run = [], whole_grids.Together.run

    def counted(self, function, arguments, grid):
        def begun(**named):
            found.append(len(self.places))
            function(**named)

        run(self, begun, arguments, grid)

    monkeypatch.setattr(whole_grids.Together, "run", counted)
    return found


def test_where_programs_part_each_goes_its_way_and_stores_once(starts):
    values, sums, odd = torch.tensor([1.0, 2, 4, 8, 16]), torch.zeros(8), torch.zeros(8, dtype=torch.int32)
    _sums_kernel[(2, 4)](LENGTHS, values, sums, odd)
    assert sums.tolist() == [107.0, 100, 131, 107, 101, 131, 100, 103]
    assert odd.tolist() == [3, 0, 5, 3, 1, 5, 0, 0]
    assert starts == [8, 2, 2, 2, 1, 1]


def test_one_counts_as_the_last_and_finds_what_all_have_stored(starts):
    values, parts, counter = torch.arange(32.0), torch.zeros(8), torch.zeros(1, dtype=torch.int32)
    out = torch.zeros(1)
    for _ in range(2):
        _last_kernel[(8,)](values, parts, counter, out)
    assert out.item() == 2 * values.sum().item() and counter.item() == 0
    assert starts == [8, 7, 1] * 2


def test_a_loop_that_each_leaves_at_another_time_ends_as_alone(monkeypatch):
    sought, found = torch.tensor([0, 63, 17, 18, 40, 5], dtype=torch.int32), []
    for _ in range(2):
        out = torch.full((6,), -1, dtype=torch.int32)
        _halves_kernel[(6,)](sought, out)
        found.append(out.tolist())
        alone(monkeypatch)
    assert found[0] == found[1] and found[0][:2] == [0, 63]


@pytest.mark.parametrize("programs", [1, 5, 70])
def test_shapes_products_and_reductions_are_each_program_s_own(monkeypatch, programs):
    values = torch.randint(-8, 8, (programs, 8, 8), generator=torch.Generator().manual_seed(3)).float()
    found = []
    for _ in range(2):
        out, place = torch.zeros(programs, 8), torch.zeros(programs, 8, dtype=torch.int32)
        _shapes_kernel[(programs,)](values, out, place)
        found.append((out, place))
        alone(monkeypatch)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    joined = values.reshape(programs, 8, 4, 2).flip(-1).reshape(programs, 8, 8)
    told = (joined * (values @ values.mT)).sum(1).cumsum(1) + values.amax(2) + values.amax((1, 2))[:, None]
    told += values.amin(2)
    expected = torch.where(torch.arange(8) < torch.arange(programs)[:, None], told, values.sum(2))
    assert torch.equal(found[0][0][:, :7], expected[:, :7]) and not found[0][0][:, 7].any()
    assert torch.equal(values.gather(2, found[0][1].long()[:, :, None])[:, :, 0], values.amax(2))


def test_what_has_no_form_for_whole_grids_is_refused_by_name():
    with pytest.raises(InterpreterError, match="create_gather"):
        _gather_kernel[(2,)](torch.arange(4.0), torch.zeros(4))
