"""Our logits processors in TensorRT-LLM's hands: shapes, dtypes, pickling, and errors that stay inside."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from bireme.engines.trtllm import logits as trtllm_logits
from bireme.engines.trtllm.logits import LogitsAdapter
from bireme.logits import registry
from bireme.logits.base import ProcessorContext
from bireme.messages import ProcessorCall

CONTEXT = ProcessorContext("r", vocab_size=8, num_prompt_tokens=2, eos_ids=(7,))


def adapter(*calls):
    return LogitsAdapter([ProcessorCall(name, args) for name, args in calls], CONTEXT)


@pytest.fixture
def registered():
    """Return a function that offers a callable as processor `planted`."""
    yield lambda call: registry.register("planted", lambda context: call)
    registry.unregister("planted")


def test_logits_are_changed_in_place():
    logits = torch.arange(8.0).view(1, 1, 8)
    before = logits.data_ptr()
    assert adapter(("temperature", {"temperature": 2.0}))(1, logits, [[3, 4]], None, 1) is None
    assert logits.data_ptr() == before
    assert torch.equal(logits[0, 0], torch.arange(8.0) / 2)


def test_processors_see_float32_rows_of_the_vocabulary_and_all_tokens(registered):
    seen = []
    registered(lambda token_ids, row: seen.append((list(token_ids), row.dtype, tuple(row.shape))))
    logits = torch.zeros(1, 1, 12, dtype=torch.bfloat16)  # the head is padded
    adapter(("planted", {}))(1, logits, [[3, 4, 5]], None, 1)
    assert seen == [([3, 4, 5], torch.float32, (8,))]


def test_where_a_picture_is_processors_see_the_placeholder_and_no_token_beyond_the_vocabulary(registered):
    seen = []
    registered(lambda token_ids, row: seen.append(list(token_ids)))
    made = pickle.loads(pickle.dumps(LogitsAdapter([ProcessorCall("planted", {})], CONTEXT, placeholder=6)))
    made(1, torch.zeros(1, 1, 8), [[3, 9, 9, 4]], None, 1)
    assert seen == [[3, 6, 6, 4]]


def test_processors_run_in_order():
    logits = torch.zeros(1, 1, 8)
    adapter(("logit_bias", {"bias": {"1": 4.0}}), ("temperature", {"temperature": 2.0}))(1, logits, [[3]], None, 1)
    assert logits[0, 0, 1] == 2.0


@pytest.mark.parametrize("shape", [(2, 1, 8), (1, 2, 8), (8,)])
def test_batches_and_beams_are_logged_and_left_alone(shape, caplog):
    logits = torch.ones(shape)
    adapter(("temperature", {"temperature": 2.0}))(1, logits, [[3]], None, 1)
    assert torch.equal(logits, torch.ones(shape))
    assert "only batch 1 and beam width 1" in caplog.text


def test_a_processor_that_raises_half_way_leaves_the_logits_untouched(registered, caplog):
    def fail(token_ids, row):
        row.fill_(9.0)
        raise RuntimeError("half way")

    registered(fail)
    one, logits = adapter(("planted", {})), torch.ones(1, 1, 8)
    for _ in range(3):
        one(1, logits, [[3]], None, 1)
    assert torch.equal(logits, torch.ones(1, 1, 8))
    assert caplog.text.count("logits_processor_failed") == 1


def test_it_travels_by_pickle_even_with_processors_that_can_not(registered):
    registered(lambda token_ids, row: row.add_(1))  # a lambda has no pickle
    one, logits = adapter(("planted", {})), torch.zeros(1, 1, 8)
    one(1, logits, [[3]], None, 1)
    pickle.loads(pickle.dumps(one))(1, logits, [[3]], None, 1)
    assert torch.equal(logits, torch.full((1, 1, 8), 2.0))


def test_copies_of_several_ranks_change_the_same_logits_alike():
    one = adapter(("min_tokens", {"min_tokens": 3}), ("frequency_penalty", {"penalty": 0.5}), ("top_k", {"top_k": 3}))
    one(1, torch.zeros(1, 1, 8), [[3, 4]], None, 1)
    ranks = [pickle.loads(pickle.dumps(one)) for _ in range(2)]
    for tokens in ([3, 4], [3, 4, 5], [3, 4, 5, 5]):
        rows = [torch.arange(8.0).view(1, 1, 8) for _ in ranks]
        for rank, row in zip(ranks, rows, strict=True):
            rank(1, row, [tokens], None, 1)
        assert torch.equal(*rows) and not torch.equal(rows[0], torch.arange(8.0).view(1, 1, 8))


def test_the_engine_s_cuda_stream_is_used_when_it_gives_one(monkeypatch):
    entered = []

    class Stream:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *args):
            entered.append(False)

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: ("stream", pointer))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Stream() if stream == ("stream", 1234) else None)
    with trtllm_logits._on_stream(1234, SimpleNamespace(is_cuda=True, device="cuda:0")):
        assert entered == [True]
    assert entered == [True, False]


@pytest.mark.parametrize("pointer", [None, 5])
def test_on_a_cpu_no_stream_is_touched(monkeypatch, pointer):
    touched = []
    for name in ("ExternalStream", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: touched.append(args))
    logits = torch.ones(1, 1, 8)
    adapter(("temperature", {"temperature": 2.0}))(1, logits, [[3]], pointer, 1)
    assert touched == [] and logits[0, 0, 0] == 0.5


def test_where_the_engine_gives_no_stream_the_present_one_serves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *args, **kwargs: pytest.fail("touched"))
    with trtllm_logits._on_stream(None, SimpleNamespace(is_cuda=True, device="cuda:0")) as entered:
        assert entered is None
