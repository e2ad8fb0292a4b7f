"""The fused decoder with its resident decode steps answers as transformers' modules do, whatever a request asks for."""

from __future__ import annotations

import logging
from collections import Counter
from unittest.mock import Mock

import msgspec
import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.config import CudaGraphConfig
from bireme.engines.torch import engine as torch_engine
from bireme.engines.torch import kernels
from bireme.engines.torch.forward import decoder_weights, graphs, sized_graphs
from bireme.engines.torch.forward import forward as forward_module
from bireme.engines.torch.forward.decode_graphs import bucket_sizes, graph_sizes
from bireme.engines.torch.forward.flash_attention import FlashAttention
from bireme.engines.torch.forward.forward import Forward
from bireme.engines.torch.forward.fused_decoder import FusedDecoder
from bireme.engines.torch.forward.graphs import capture
from bireme.engines.torch.forward.mixed_steps import _SIZES
from bireme.engines.torch.forward.modules import Modules
from bireme.engines.torch.forward.sized_graphs import SizedGraphs, by_need
from bireme.serving_options import ServingOptions
from tests.engines.engine_fixtures import wait_for
from tests.engines.torch import tiny_models
from tests.engines.torch.torch_harness import Harness, make_prompts, request

pytestmark = pytest.mark.usefixtures("few_programs")
PROMPTS = make_prompts(5, 9, 3, seed=1)
ASKED = [
    [request(PROMPTS[0], 5), request(PROMPTS[1], 3, temperature=1.1, seed=5, top_p=0.9)],
    [request(PROMPTS[2], 4, temperature=0.8, seed=9, top_k=20, min_p=0.02), request(PROMPTS[1], 3, logprobs=2)],
    [request(PROMPTS[0], 3, temperature=1.0, seed=3, repetition_penalty=1.4), request(PROMPTS[2], 4)],
    [request(PROMPTS[0], 4, bad_token_ids=((5,), (9, 3)), logit_bias={7: 2.0}, logprobs=1), request(PROMPTS[2], 4)],
]
SHORT = [[request(PROMPTS[1], 3), request(PROMPTS[2], 2)]]
# What families differ in; small enough for Triton's interpreter.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
KINDS = {
    "mistral": {"sliding_window": 10},
    "gemma2": {
        "num_hidden_layers": 2,
        "sliding_window": 10,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gpt_oss": {"num_hidden_layers": 2, "sliding_window": 10, "num_local_experts": 4, "num_experts_per_tok": 2},
}
ENGINE = {"max_seq_len": 24, "max_batch_size": 2, "tokens_per_block": 4}


def of_a_soak(value):
    """Return a parameter that takes Triton's interpreter long: where there is no GPU, `make soak` has it."""
    return value if torch.cuda.is_available() else pytest.param(value, marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=["mistral", *(of_a_soak(kind) for kind in KINDS if kind != "mistral")])
def answer(request, tmp_path_factory):
    """Return what an engine answers, by its settings: of the first kind all that may be asked."""
    path = tiny_models.save(tmp_path_factory.mktemp("model"), request.param, **(SMALL | KINDS[request.param]))
    asked = ASKED if request.param == "mistral" or torch.cuda.is_available() else SHORT

    def run(is_fused, **settings):
        with Harness(path, **ENGINE, **settings) as engine:
            assert (engine.core._parts.forward.resident is not None) is is_fused
            return [engine.run(requests) for requests in asked]

    return run


@pytest.mark.parametrize("is_serial", [False, True] if torch.cuda.is_available() else [False])
def test_an_engine_on_the_fused_decoder_answers_as_one_on_modules(answer, monkeypatch, is_serial):
    with monkeypatch.context() as changed:
        changed.setattr(kernels, "is_usable", lambda device: False)
        changed.setattr(decoder_weights, "FAMILIES", ())
        expected = answer(is_fused=False)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    assert answer(is_fused=True, disable_overlap_scheduler=is_serial) == expected


def test_prompts_that_join_decodes_in_parts_are_answered_as_alone(tmp_path, monkeypatch):
    path = tiny_models.save(tmp_path, "mistral", **(SMALL | KINDS["mistral"]))
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    asked = [request(prompt, 6, temperature=at % 2, seed=at) for at, prompt in enumerate(make_prompts(11, 3, 13, 7))]
    settings = {**ENGINE, "max_batch_size": 4, "max_num_tokens": 9, "enable_block_reuse": False}
    with Harness(path, **settings) as engine:
        expected = [engine.run([one])[0] for one in asked]
        first = engine.submit(request(PROMPTS[0], 18))
        assert first.has_tokens.wait(60)
        assert engine.run(asked) == expected and first.finish.error == ""
        engine.settle()
        counters = engine.metrics.take_delta().counters
    steps = {labels[-1]: count for name, labels, count in counters if name == "bireme_engine_steps_total"}
    assert steps["mixed"] > 8 and set(steps) == {"mixed", "resident"}


def test_blocks_that_come_back_beside_a_running_decode_come_once(tmp_path, monkeypatch, caplog):
    path = tiny_models.save(tmp_path, "mistral", **SMALL)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    first, second = (request(prompt, 2) for prompt in make_prompts(9, 9, seed=2))
    with Harness(path, **ENGINE, max_tokens=4 * 10, host_cache_size=1 << 16) as engine:
        expected = [engine.run([one])[0] for one in (first, second)]
        for prompt in make_prompts(9, 9, 9, 9, seed=3):
            engine.run([request(prompt, 2)])
            engine.settle()
        before = engine.manager.tiers.counts.onboarded.total()
        decodes = engine.submit(request(PROMPTS[0], 14))
        assert decodes.has_tokens.wait(60)
        assert engine.run([first, second]) == expected
        assert decodes.finish.error == "" and engine.manager.tiers.counts.onboarded.total() > before
    failures = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert failures == []  # an action that fails is logged


@pytest.mark.parametrize("is_serial", [of_a_soak(False), of_a_soak(True)])
def test_what_rests_beside_others_goes_on_with_what_the_device_has_of_it(tmp_path, monkeypatch, is_serial):
    path = tiny_models.save(tmp_path, "mistral", **SMALL)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    line = request(PROMPTS[0], 12, temperature=1.1, seed=5)
    queue = {"best_effort_share": 0.3}
    with Harness(path, **ENGINE, queue=queue, disable_overlap_scheduler=is_serial) as engine:
        expected = engine.run([line, request(PROMPTS[1], 12)])
        resting = engine.submit(msgspec.structs.replace(line, options=ServingOptions(priority=0.0)))
        assert resting.has_tokens.wait(60)
        live = engine.submit(request(PROMPTS[1], 12))
        assert [live.finish.error, live.tokens] == ["", expected[1]]
        assert [resting.finish.error, resting.tokens] == ["", expected[0]]
        assert engine.core.scheduler.best_effort.num_rests > 5


def test_a_later_life_compares_it_with_what_the_modules_computed_in_the_first(tmp_path, monkeypatch):
    path, context = tiny_models.save(tmp_path, "mistral", **SMALL), {"findings_path": tmp_path / "found"}
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    with Harness(path, **ENGINE, context=context) as engine:
        expected = engine.run([request(PROMPTS[2], 3)])
    monkeypatch.setattr(Modules, "compute", None)
    with Harness(path, **ENGINE, context=context) as engine:
        assert engine.core._parts.forward.resident is not None and engine.run([request(PROMPTS[2], 3)]) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_choices_that_need_the_host_wait_for_nothing(tmp_path, monkeypatch):
    path = tiny_models.save(tmp_path, "mistral", **SMALL)
    with Harness(path, **ENGINE) as engine:
        asked = [ASKED[3][0], request(PROMPTS[1], 8, min_tokens=6, presence_penalty=0.5, temperature=0.9, seed=4)]
        expected = [engine.run([one])[0] for one in asked]  # allocators and kernels have met all of it
        late = engine.core._late
        choose, num_steps = late.choose, []

        def watched(flight, batch):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return choose(flight, batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                num_steps.append(len(batch))

        monkeypatch.setattr(late, "choose", watched)
        assert engine.run(asked) == expected and len(num_steps) > 6


class ComputedAgain:
    """In the place of a CUDA graph."""

    def __init__(self, compute):
        self.replay, self.pool = compute, lambda: (0, 0)


@pytest.fixture
def recorded(monkeypatch):
    """Return what graphs of sizes were warmed by, and how often each was replayed."""
    layers, replays = [], Counter()

    def record(compute, pool, warm):
        (size,) = compute.args
        layers.append((size, warm.keywords.get("num_layers")))

        def replay():
            replays[size] += 1
            return compute()

        return ComputedAgain(replay), warm()

    monkeypatch.setattr(graphs, "record", record)
    return layers, replays


@pytest.fixture
def engine_without_graphs(tmp_path, monkeypatch):
    """It makes none by itself: Triton's interpreter is of one thread at a time."""
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    monkeypatch.setattr(torch_engine, "_QUIET_S", 3600.0)
    with Harness(tiny_models.save(tmp_path, "mistral", **(SMALL | {"num_hidden_layers": 2})), **ENGINE) as engine:
        yield engine


no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="real graphs are made there, by every test of this module"
)


def sized(steps, sizes):
    """Give them graphs to make."""
    steps.graphs = SizedGraphs(steps, sizes, steps.decoder.num_kinds, "decode_graph_made size", "graph_off size")
    return steps.graphs


@no_gpu
def test_a_larger_graph_stands_in_for_one_that_is_made_while_nothing_runs(
    engine_without_graphs, recorded, monkeypatch, caplog
):
    engine, (layers, replays) = engine_without_graphs, recorded
    expected = engine.run([request(PROMPTS[2], 3)])
    with caplog.at_level("INFO"):
        made = sized(engine.core._parts.forward.resident, [1, 2])
        made.make(2)
        replays.clear()
        assert engine.run([request(PROMPTS[2], 3)]) == expected
        assert replays == {2: 2} and made.to_make == [1]
        monkeypatch.setattr(torch_engine, "_QUIET_S", 0.0)
        engine.engine._post(lambda: None)  # it sleeps
        wait_for(lambda: not made.to_make, 30)
        engine.settle()
        replays.clear()
        assert engine.run([request(PROMPTS[2], 3)]) == expected and replays == {1: 2}
    lines = [record.getMessage() for record in caplog.records if "graph" in record.getMessage()]
    assert [line.partition(" s=")[0] for line in lines] == ["decode_graph_made size=2", "decode_graph_made size=1"]
    assert layers == [(2, None), (1, 1)]  # the first is compared whole; then one layer has all the kernels


@no_gpu
def test_one_that_nothing_stands_in_for_is_made_when_many_steps_have_lacked_it(
    engine_without_graphs, recorded, monkeypatch
):
    engine, (_, replays) = engine_without_graphs, recorded
    monkeypatch.setattr(sized_graphs, "MOST_MISSES", 4)
    made = sized(engine.core._parts.forward.resident, [1])
    engine.run([request(PROMPTS[2], 4)])  # three steps of one row
    assert made.to_make == [1] and replays == {}
    engine.run([request(PROMPTS[2], 4)])
    assert made.to_make == [] and replays == {1: 1 + 3}


def test_one_that_a_larger_stands_in_for_is_made_later(recorded, monkeypatch):
    monkeypatch.setattr(sized_graphs, "MOST_MISSES", 2)
    monkeypatch.setattr(sized_graphs, "MOST_STOOD_IN", 4)
    logits = torch.zeros(8, 3)
    step = Mock(compute=lambda size, num_layers=None: logits[:size].fill_(1.0))
    made = SizedGraphs(step, [1, 2, 4, 8], 1, "made", "off")
    made.make(4)
    assert [made.size_for(8, 8) for _ in range(3)] == [0, 8, 8]
    assert [made.size_for(2, 8) for _ in range(5)] == [4, 4, 4, 2, 2]
    assert [made.size_for(1, 1) for _ in range(3)] == [0, 1, 1]
    assert [made.size_for(16, 32) for _ in range(9)] == [0] * 9


def test_first_graphs_are_the_largest_and_some_that_stand_in_for_the_others():
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 128]
    assert by_need(sizes, 2) == ([1, 4, 8, 16, 32], [128, 1, 2, 4, 8, 16, 32, 64], [48, 24])
    assert by_need(sizes, 16) == ([1, 4, 8, 16, 32], [128, 1, 16], [64, 48, 32, 24, 8, 4, 2])
    assert by_need([64, 128, 192, 256], 2) == ([], [256, 64, 128], [192]) and by_need([], 2) == ([], [], [])


def refuse():
    raise RuntimeError("no room\nmore")


@no_gpu
@pytest.mark.parametrize(
    ("replay_of", "reason"),
    [
        (lambda compute: refuse(), "no room"),
        (lambda compute: lambda: compute().neg_(), "the graph is 2 off"),
        (lambda compute: lambda: None, "the graph is nan off"),
    ],
    ids=["raises", "another result", "does nothing"],
)
def test_steps_go_on_without_graphs_that_cannot_be_made_or_compute_something_else(
    engine_without_graphs, recorded, monkeypatch, caplog, replay_of, reason
):
    engine, record = engine_without_graphs, graphs.record

    def spoil(compute, pool, warm):
        graph, result = record(compute, pool, warm)
        return (ComputedAgain(replay_of(compute)) if compute.args == (1,) else graph), result

    expected = engine.run([request(PROMPTS[2], 3)])
    monkeypatch.setattr(graphs, "record", spoil)
    forward = engine.core._parts.forward
    made = sized(forward.resident, [1, 2])
    forward.make_first_graphs(60.0)
    assert sorted(made.made) == [2] and engine.run([request(PROMPTS[2], 3)]) == expected
    assert [line.getMessage() for line in caplog.records] == [f"graph_off size=1 reason={reason}"]


@pytest.mark.parametrize(
    ("family", "changes", "windows", "expected"),
    [
        ("mistral", {}, [0, 0, 0, 0], 1),
        ("gemma2", KINDS["gemma2"], [10, 0, 10, 0], 2),
        ("gemma3_text", {}, [10, 10, 10, 0], 4),
        ("qwen3_moe", KINDS["qwen3_moe"] | {"mlp_only_layers": [2]}, [0, 0, 0, 0], 3),
        ("gpt_oss", KINDS["gpt_oss"], [10, 0, 10, 0], 2),
    ],
)
def test_a_graph_is_warmed_by_as_many_layers_as_hold_all_kinds(family, changes, windows, expected):
    model = tiny_models.build(family, **(SMALL | changes | {"num_hidden_layers": 4}))
    store = Mock(windows=windows, group_of=range(4), dtype=torch.float32)
    assert FusedDecoder(decoder_weights.fuse(model, 24), store, FlashAttention()).num_kinds == expected


class Clocked(SizedGraphs):
    """Each takes 40 ms of a clock that is no clock, the first 100, and a form's kernels 2 s."""

    def __init__(self, name, now, made, sizes, apart):
        step = Mock(compute=lambda size, num_layers: now.__setitem__(0, now[0] + 2))
        super().__init__(step, sizes, 1, "", "", apart)
        self._name, self._now, self._list = name, now, made

    def _make(self, size):
        self._now[0] += 0.04 if self._list else 0.1
        self._list.append(f"{self._name} {size}")


FIRST = ["mixed 768", "resident 256", "mixed 64", "resident 1", "mixed 128", "resident 16", "mixed 256", "mixed 512"]


@pytest.mark.parametrize(("most_s", "count"), [(0.33, 6), (0.05, 1), (0.0, 1)])
def test_before_it_is_ready_graphs_are_made_as_there_is_time_and_all_forms_are_compiled(monkeypatch, most_s, count):
    forward, found, now = clocked(monkeypatch)
    forward.make_first_graphs(most_s)
    assert found == FIRST[:count]
    assert now[0] == pytest.approx(5.0 + 5 * 2 + 0.1 + (count - 1) * 0.04)


def test_before_it_is_ready_those_are_made_that_the_first_requests_need(monkeypatch):
    forward, found, _ = clocked(monkeypatch)
    forward.make_first_graphs(9.0)
    assert found == FIRST
    assert forward.mixed.graphs.to_make == [640, 448, 384, 320, 192]
    assert forward.resident.graphs.to_make[:3] == [224, 192, 160] and forward.resident.graphs.to_make[-3:] == [8, 4, 2]


def test_kernels_of_a_form_that_can_not_be_compiled_are_said_and_the_start_goes_on(caplog):
    step = Mock(compute=Mock(side_effect=RuntimeError("no such instruction\nmore")))
    graphs = SizedGraphs(step, [1, 64], 1, "made", "off")
    graphs.compile_forms()
    graphs.compile_forms()
    assert [line.getMessage() for line in caplog.records] == ["off=1 reason=no such instruction"]


def clocked(monkeypatch):
    now, found = [5.0], []
    monkeypatch.setattr(forward_module, "time", Mock(monotonic=lambda: now[0]))
    forward = Forward(Modules(None, Mock(device=torch.device("cpu"))), None)
    forward.mixed = Mock(graphs=Clocked("mixed", now, found, list(_SIZES), 2))
    forward.resident = Mock(graphs=Clocked("resident", now, found, bucket_sizes(256), 16))
    return forward, found, now


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_garbage_on_the_gpu_is_not_freed_within_a_capture():
    """Collecting it there broke the capture."""
    x = torch.zeros(8, device="cuda")

    def graph_of(action):
        graph = torch.cuda.CUDAGraph()
        with capture(graph, None):
            action()
        return graph

    garbage = [graph_of(lambda: x.add_(1)), torch.zeros(1 << 20).pin_memory(), torch.cuda.Event()]
    garbage.append(garbage)
    del garbage
    kept = []
    graph = graph_of(lambda: (kept.extend([] for _ in range(100_000)), x.add_(1)))
    before = x[0].item()
    graph.replay()
    assert x[0].item() == before + 1


def test_graphs_are_made_for_the_sizes_that_the_settings_name():
    assert graph_sizes(None, 64) == []
    assert graph_sizes(CudaGraphConfig(batch_sizes=(8, 2, 100)), 64) == [2, 8]
    assert graph_sizes(CudaGraphConfig(max_batch_size=4), 64) == [1, 2, 4]
    assert graph_sizes(CudaGraphConfig(), 8)[-1] == 8


def test_random_weights_of_a_configuration_need_no_weights_file(tmp_path):
    folder = tiny_models.save(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with Harness(folder, load_format="dummy", dtype="bfloat16") as engine:
        assert len(engine.run([request(PROMPTS[0], 5)])[0]) == 5
        assert engine.capacity.dtype == "bfloat16"
