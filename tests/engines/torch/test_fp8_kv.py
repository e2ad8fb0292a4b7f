"""Keys and values kept as 8-bit floats: kernels attend to what pools keep, and engines agree with themselves."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.config import CacheTransceiverConfig
from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord, host_id
from bireme.engines.torch import kernels
from bireme.engines.torch.forward.attention import Extras, store_rows
from bireme.engines.torch.forward.flash_attention import FlashAttention
from bireme.engines.torch.geometry import KvScales, Rotary
from bireme.engines.torch.kernels import chunk_attention, decode_attention, rotary
from bireme.engines.torch.kernels.packed_prefill import packed_prefill
from bireme.engines.torch.kernels.paged_decode import paged_decode
from bireme.engines.torch.step import PackedChunks
from bireme.engines.torch.storage import E4M3, to_fp8
from bireme.errors import ConfigError, RequestError
from bireme.kv.blocks.events import DISK, HOST
from bireme.kv.transfer.exporter import check_layouts
from bireme.kv.transfer.fake import FakeNetwork
from bireme.kv.transfer.host_pool import HostPool
from bireme.kv.transfer.leased import LeasedTransfer
from bireme.metrics import Registry
from tests.engines.torch import kernel_references as references
from tests.engines.torch import tiny_models
from tests.engines.torch.test_fused_decoder import of_a_soak
from tests.engines.torch.test_tiers import settle
from tests.engines.torch.torch_harness import Harness, make_prompts, request
from tests.kv.transfer.kv_side import backend_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, NUM_KV, SIZE, BLOCK_SIZE, BLOCKS = 4, 2, 16, 8, 60
SCALES = KvScales(0.02, 0.3)
TO_SUBNORMALS = KvScales(150.0, 150.0)  # of numbers about 1, which tensor cores must not take for zeros
close = torch.testing.assert_close


@pytest.fixture
def randn():
    rng = torch.Generator(DEVICE).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=rng, device=DEVICE)


def pools(randn):
    """Return keys and values as they are kept, and what these are in float32."""
    shape = BLOCKS * BLOCK_SIZE, NUM_KV * SIZE
    kept = [to_fp8(randn(*shape), scale) for scale in (SCALES.keys, SCALES.values)]
    return kept, whole_of(kept)


def whole_of(kept, scales=SCALES):
    return [pool.float() * scale for pool, scale in zip(kept, (scales.keys, scales.values), strict=True)]


def test_a_decode_step_of_modules_attends_to_what_is_kept(randn):
    kept, whole = pools(randn)
    query, lengths = randn(2, HEADS, SIZE), torch.tensor([1, 70], dtype=torch.int32, device=DEVICE)
    table = torch.randperm(BLOCKS, device=DEVICE)[:20].view(2, 10).int()
    given = (table, lengths, BLOCK_SIZE, NUM_KV, 0.3, 40, 2.0, randn(HEADS))
    close(paged_decode(query, *kept, *given, scales=SCALES), references.paged_decode(query, *whole, *given))


@pytest.mark.parametrize("parts", [1, 3])
def test_prompts_attend_to_what_is_kept(randn, parts):
    kept, whole = pools(randn)
    own, seen = (torch.tensor(ends, dtype=torch.int32, device=DEVICE) for ends in ([0, 3, 20], [0, 3, 90]))
    rows = torch.randint(0, len(kept[0]), (90,), device=DEVICE)
    given = (rows, own, seen, 17, NUM_KV, 0.3)
    query = randn(20, HEADS, SIZE)
    close(
        packed_prefill(query, *kept, *given, parts=parts, scales=SCALES),
        references.packed_prefill(query, *whole, *given),
    )


def test_a_step_of_decodes_and_prompts_stores_and_attends_to_what_it_keeps(randn):
    """A token's own key and value are attended to as whoever comes later finds them, and none is infinite."""
    qkv, how = randn(3, (HEADS + 2 * NUM_KV) * SIZE), Rotary(randn(200, SIZE), 1e-6)
    qkv[1, -3:] = torch.tensor([1e5, -1e5, 150.0])  # values that 448 times the scale does not reach, or just so
    slots, positions = (np.array(values, dtype=np.int32) for values in ([2, 0, 1], [0, 130, 70]))
    parts = decode_attention.cut_into_parts(slots, positions, 16, 16, 0, decode_attention.tile_of(qkv.dtype, SIZE))
    table = torch.randperm(BLOCKS, device=DEVICE).view(3, 20).int()
    scratch = decode_attention.Scratch.make(3, HEADS, NUM_KV, SIZE, torch.device(DEVICE))
    (keys, values), whole = pools(randn)
    told = torch.from_numpy(parts).to(DEVICE)
    given = (told, table, keys, values, scratch, BLOCK_SIZE, HEADS, 0.3)
    found = decode_attention.decode_attention(qkv, how, *given, scales=SCALES)
    at = torch.from_numpy(positions).to(DEVICE).long()
    own = table[torch.from_numpy(slots).to(DEVICE).long()]
    rows = own.gather(1, (at // BLOCK_SIZE)[:, None]).long()[:, 0] * BLOCK_SIZE + at % BLOCK_SIZE
    turned = references.rotate_and_store(qkv, None, None, 0.0, how.cos_sin, at, rows, *whole, HEADS)
    for pool, scale in zip(whole, (SCALES.keys, SCALES.values), strict=True):
        pool[rows] = to_fp8(pool[rows], scale).float() * scale
    for ours, theirs in zip(whole_of((keys, values)), whole, strict=True):
        close(ours, theirs)
    assert whole[1][rows[1], -3:].tolist() == pytest.approx([448 * 0.3, -448 * 0.3, 448 * 0.3])
    lengths = (at + 1).int()
    expected = references.paged_decode(turned[:, :HEADS], *whole, own, lengths, BLOCK_SIZE, NUM_KV, 0.3)
    close(found, expected.flatten(1))
    again = [torch.zeros_like(pool) for pool in (keys, values)]
    out = rotary.rotate_and_store(qkv, None, None, 0.0, how.cos_sin, at, rows, *again, HEADS, SCALES)
    for ours, theirs in zip(again, (keys, values), strict=True):
        assert torch.equal(ours.view(torch.uint8)[rows], theirs.view(torch.uint8)[rows])
    close(out, turned)
    tiles = np.concatenate(
        [
            chunk_attention.cut_into_tiles(row, 1, slot, position, 16)
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True))
        ]
    )
    chunked = torch.zeros_like(found)
    told = torch.from_numpy(tiles).to(DEVICE)
    chunk_attention.chunk_attention(turned, told, table, keys, values, chunked, BLOCK_SIZE, HEADS, 0.3, scales=SCALES)
    close(chunked, expected.flatten(1))


def test_a_step_in_float16_attends_to_what_is_kept(randn):
    """Which has no room for numbers 2**120 times too small, as pairs of 8 bits are for other dtypes."""
    qkv, how = randn(3, (HEADS + 2 * NUM_KV) * SIZE).half(), Rotary(randn(200, SIZE), 1e-6)
    slots, positions = (np.array(values, dtype=np.int32) for values in ([2, 0, 1], [0, 130, 70]))
    (keys, values), _ = pools(randn)
    table = torch.randperm(BLOCKS, device=DEVICE).view(3, 20).int()
    scratch = decode_attention.Scratch.make(3, HEADS, NUM_KV, SIZE, torch.device(DEVICE))

    def attended(rows):
        parts = decode_attention.cut_into_parts(slots, positions, 16, 16, 0, decode_attention.tile_of(rows.dtype, SIZE))
        told = torch.from_numpy(parts).to(DEVICE)
        given = (told, table, keys.clone(), values.clone(), scratch, BLOCK_SIZE, HEADS, 0.3)
        return decode_attention.decode_attention(rows, how, *given, scales=SCALES)

    close(attended(qkv).float(), attended(qkv.float()), atol=0.02, rtol=0.02)


def test_modules_store_what_the_kernels_do(randn):
    pool = torch.zeros(30, NUM_KV * SIZE, device=DEVICE).to(E4M3)
    new, slots = 300 * randn(1, NUM_KV, 5, SIZE), torch.tensor([3, 9, 1, 29, 7], device=DEVICE)
    store_rows(slots, new, pool, 0.3)
    expected = to_fp8(new[0].transpose(0, 1).flatten(1), 0.3)
    assert torch.equal(pool.view(torch.uint8)[slots], expected.view(torch.uint8)) and not pool.float().isnan().any()


@pytest.mark.parametrize("is_fresh", [False, True])
def test_flash_attention_takes_what_is_kept_converted(randn, monkeypatch, is_fresh):
    """Of a fresh prompt, too: its own keys and values are not used as they were computed."""
    from bireme.engines.torch.forward import flash_attention

    def by_torch(query, key, value, chunks, scaling, window):
        assert query.dtype == key.dtype == value.dtype == torch.bfloat16
        grouped = [part.repeat_interleave(HEADS // NUM_KV, 1).float() for part in (key, value)]
        weights = torch.einsum("thk,lhk->htl", query.float(), grouped[0]) * scaling
        return torch.einsum("htl,lhv->thv", weights.softmax(-1), grouped[1]).to(query.dtype)

    monkeypatch.setattr(flash_attention, "_attend_by_torch", by_torch)
    kept, whole = pools(randn)
    rows = torch.arange(5, 45, device=DEVICE)
    begins = [torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)] * 2
    chunks = PackedChunks(0, 40, rows, *begins, 40, 40, is_fresh=is_fresh)
    query, nothing = randn(40, HEADS, SIZE).bfloat16(), torch.full((40, NUM_KV, SIZE), float("nan"), device=DEVICE)
    nothing = nothing.bfloat16()
    found = FlashAttention(True).attend(chunks, query, nothing, nothing, *kept, 0, Extras(0.3), SCALES)
    floats = [part[rows].view(40, NUM_KV, SIZE).repeat_interleave(HEADS // NUM_KV, 1) for part in whole]
    weights = torch.einsum("thk,lhk->htl", query.float(), floats[0]) * 0.3
    close(found.float(), torch.einsum("htl,lhv->thv", weights.softmax(-1), floats[1]), atol=0.02, rtol=0.02)


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
ENGINE = {"max_seq_len": 32, "max_batch_size": 2, "tokens_per_block": 4, "kv_dtype": "fp8"}
PROMPTS = make_prompts(11, 9, seed=1)
ASKED = [request(PROMPTS[0], 8), request(PROMPTS[1], 8, temperature=1.1, seed=5)]


def add_scales(folder, **scales):
    """Have the checkpoint tell scales by compressed-tensors' names."""
    own = {f"model.layers.0.self_attn.{part}": torch.tensor([value]) for part, value in scales.items()}
    save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    path = tiny_models.save(folder, "mistral", **SMALL, sliding_window=None)
    add_scales(folder, k_scale=0.011, v_scale=0.004)
    return path


@pytest.fixture
def open_engine(path, monkeypatch, few_programs):
    """Return a function that starts an engine on the kernels."""
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    opened = []

    def make(*transfer, path=path, **settings):
        opened.append(Harness(path, *transfer, **(ENGINE | settings)))
        return opened[-1]

    yield make
    for engine in opened:
        engine.engine.stop()


@pytest.fixture(scope="module")
def expected(path):
    """What one engine answers; it is asked once."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(kernels, "is_usable", lambda device: True)
        with Harness(path, **ENGINE) as engine:
            assert engine.core._parts.forward.resident is not None  # it agrees with modules over the same pools
            return engine.run(ASKED)


def test_tokens_are_the_same_with_reuse_in_parts_after_a_migration_and_a_preemption(open_engine, expected):
    queue = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    engine = open_engine(queue=queue, max_tokens=4 * 8, max_num_tokens=7)
    assert engine.run(ASKED) == expected and engine.core.scheduler.num_preemptions > 0
    again = [engine.submit(one) for one in ASKED]
    assert [one.finish.error or one.tokens for one in again] == expected
    assert any(one.finish.usage.cached_tokens for one in again)
    moved = engine.submit(request(PROMPTS[0] + expected[0][:3], 8, num_resumed=3))
    assert moved.finish.error == "" and moved.tokens == expected[0][3:]


@pytest.fixture
def shared_memory(tmp_path):
    """Return the transfers of a prefill and a decode engine of one host."""
    config, transfers, metrics = CacheTransceiverConfig(backend="DEFAULT"), [], Registry("decode")
    for worker in ("prefill", "decode"):
        mover = backend_of("shm", tmp_path, worker, 1)
        own = {"run_dir": tmp_path, "worker": worker, "life": 1, "config": config, "metrics": metrics}
        transfers.append(LeasedTransfer(mover, **own, chunk_bytes=4096))
    address = {"host": host_id(), "transfer_endpoint": transfers[0].endpoint}
    run_folder.publish(tmp_path, WorkerRecord(worker="prefill", life=1, pid=os.getpid(), **address))
    yield transfers, metrics
    for transfer in transfers:
        transfer.close()


def begin(prefill, asked):
    first = prefill.submit(msgspec.structs.replace(asked, request_type="context_only"))
    assert first.finish.error == ""
    return first.exported


def go_on(decode, asked, params):
    return decode.submit(msgspec.structs.replace(asked, request_type="generation_only"), params)


@pytest.mark.parametrize("is_mapped", [True, of_a_soak(False)])
def test_tokens_are_the_same_where_kv_came_from_prefill(open_engine, expected, shared_memory, monkeypatch, is_mapped):
    if not is_mapped:  # as between hosts: rows go through a buffer
        monkeypatch.setattr(HostPool, "shared", lambda pool: None)
    (exports, imports), metrics = shared_memory
    prefill = open_engine(exports, "prefill", tokens_per_block=8)
    params = [begin(prefill, one) for one in ASKED]
    decode = open_engine(imports, "decode")
    results = [go_on(decode, *one) for one in zip(ASKED, params, strict=True)]
    assert [one.finish.error or one.tokens for one in results] == expected
    moved = {
        labels: count for name, labels, count in metrics.take_delta().counters if name.endswith("transfer_bytes_total")
    }
    assert set(moved.values()) == {20 * 2 * 16}  # a byte each


def test_blocks_come_back_from_host_memory_and_disk_as_they_were(open_engine, expected, tmp_path):
    below = {"host_cache_size": 8 * 128, "disk_cache_size": 1 << 16, "disk_cache_path": str(tmp_path)}
    engine = open_engine(max_tokens=4 * 9, **below)
    assert [engine.run([one])[0] for one in ASKED] == expected
    for others in (make_prompts(11, seed=2), make_prompts(11, 11, 11, seed=3)):  # out to host memory, then to disk
        for prompt in others:
            engine.run([request(prompt, 2)])
            settle(engine)
        assert [engine.run([one])[0] for one in ASKED] == expected
        settle(engine)
    assert {tier for (tier, _), count in engine.manager.tiers.counts.onboarded.items() if count} == {HOST, DISK}


def test_a_side_that_keeps_kv_otherwise_is_refused_by_name(open_engine, expected):
    network = FakeNetwork()
    params = begin(open_engine(network.join("prefill"), "prefill"), ASKED[0])
    refused = go_on(open_engine(network.join("decode"), "decode", kv_dtype="auto"), ASKED[0], params)
    assert "KV layout: dtype is float8_e4m3fn on prefill and float32 on decode" in refused.finish.error


def test_form_and_scales_are_said_and_part_of_what_both_sides_agree_on_and_of_what_is_reused(open_engine, caplog):
    caplog.set_level("INFO", "bireme.engines.torch")
    engine = open_engine()
    told = [line.getMessage() for line in caplog.records]
    assert any(line.startswith("kv_scales source=checkpoint layers=1 keys=0.011..0.011") for line in told)
    assert any(line.startswith("engine_loaded") and " kv=float8_e4m3fn " in line for line in told)
    assert ("bireme_kv_form", ("decode", "float8_e4m3fn"), 1.0) in engine.metrics.take_delta().gauges
    store = engine.core._parts.forward.decoder._store
    own = store.layout("model")
    other = msgspec.structs.replace(own, scales=((0.5, 0.5), *own.scales[1:]))
    with pytest.raises(
        RequestError, match=r"KV layout: scales\[0\] is \(0.01\d+, 0.00\d+\) on prefill and \(0.5, 0.5\)"
    ):
        check_layouts(own, other)
    plain = msgspec.structs.replace(own, dtype="bfloat16", scales=())
    assert len({own.identity, other.identity, plain.identity}) == 3 and plain.identity == "model"
    assert own.bytes_per_token == 2 * 16 and store.num_bytes == own.bytes_per_token * len(store.keys[0])


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU takes it")
def test_a_cpu_refuses_it_by_name_before_the_weights_are_read(path):
    with pytest.raises(
        ConfigError, match="kv_cache_config.dtype: 'fp8' on engine torch: a CPU, or a GPU without triton"
    ):
        Harness(path, **ENGINE)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(("rows", "scales"), [(1, SCALES), (9, SCALES), (33, SCALES), (33, TO_SUBNORMALS)])
def test_bfloat16_attends_to_what_is_kept_on_a_gpu(randn, rows, scales):
    """As products of a model's own shape do: decodes by their kernel, prompts by torch's flash attention."""
    heads, num_kv, size, blocks = 32, 8, 128, 40
    kept = [to_fp8(randn(rows * blocks * 32, num_kv * size), scale) for scale in (scales.keys, scales.values)]
    whole = whole_of(kept, scales)
    positions = np.arange(1100, 1100 + rows, dtype=np.int32)
    slots, table = (
        np.arange(rows, dtype=np.int32),
        torch.randperm(rows * blocks, device=DEVICE).view(rows, blocks).int(),
    )
    qkv = randn(rows, (heads + 2 * num_kv) * size).bfloat16()
    how = Rotary(torch.cat([torch.ones(64), torch.zeros(64)]).repeat(2000, 1).to(DEVICE), 1e-6)
    tile, most = decode_attention.tile_of(qkv.dtype, size), decode_attention.most_parts(num_kv)
    parts = decode_attention.cut_into_parts(slots, positions, decode_attention.num_parts(rows, num_kv), most, 0, tile)
    scratch = decode_attention.Scratch.make(rows, heads, num_kv, size, torch.device(DEVICE))
    told = torch.from_numpy(parts).to(DEVICE)
    given = (told, table, *kept, scratch, 32, heads, size**-0.5)
    found = decode_attention.decode_attention(qkv, how, *given, scales=scales)
    whole = whole_of(kept, scales)  # with the rows' own
    lengths = torch.from_numpy(positions + 1).to(DEVICE)
    query = qkv.view(rows, -1, size)[:, :heads]
    expected = references.paged_decode(query.float(), *whole, table, lengths, 32, num_kv, size**-0.5).flatten(1)
    assert float((found.float() - expected).norm() / expected.norm()) < 0.01
    seen = torch.randperm(len(kept[0]), device=DEVICE)[:600]
    begins = [torch.tensor([0, count], dtype=torch.int32, device=DEVICE) for count in (rows, 600)]
    chunks = PackedChunks(0, rows, seen, *begins, rows, 600, is_fresh=False)
    own = query[:, :num_kv].contiguous()
    found = FlashAttention(True).attend(chunks, query, own, own, *kept, 0, Extras(size**-0.5), scales)
    expected = references.packed_prefill(query.float(), *whole, seen, *begins, rows, num_kv, size**-0.5)
    assert float((found.float() - expected).norm() / expected.norm()) < 0.01
