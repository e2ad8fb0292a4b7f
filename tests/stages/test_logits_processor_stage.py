import asyncio
import json
from concurrent.futures import Future

import numpy as np
import pytest

from bireme.config import Limits, Recipe
from bireme.errors import RequestCancelledError, RequestError
from bireme.metrics import Registry
from bireme.stages.logits_processor import LogitsProcessor, eos_ids_of, parse_job
from bireme.types import Cancelled, Inputs, RequestInfo, StageContext

LOGITS = np.linspace(-1, 1, 10, dtype=np.float32)[None]
TEMPERATURE = [{"name": "temperature", "args": {"temperature": 0.5}}]


def tensors(logits=LOGITS, processors=TEMPERATURE, **ids):
    text = processors if isinstance(processors, bytes) else json.dumps(processors).encode()
    inputs = {"logits": logits, "processors": np.array([text], object)}
    inputs |= {name: np.array(values, np.int32) for name, values in ids.items()}
    return Inputs(inputs, RequestInfo("r1"))


def parse(*args, limits=None, eos_ids=(), **kwargs):
    return parse_job(tensors(*args, **kwargs), limits or Limits(), eos_ids)


def histories(job):
    return [np.frombuffer(history, np.int32).tolist() for history in job.histories]


def test_one_row_needs_logits_and_processors_only():
    job = parse()
    assert (job.num_rows, job.vocab_size, job.logits, job.request_id) == (1, 10, LOGITS.tobytes(), "r1")
    assert (histories(job), job.num_prompt_tokens) == ([[]], (0,))


def test_a_single_row_s_history_needs_no_length():
    assert histories(parse(input_ids=[1, 2, 3])) == [[1, 2, 3]]


def test_histories_of_several_rows_are_cut_by_their_lengths():
    job = parse(np.repeat(LOGITS, 3, 0), input_ids=[1, 2, 3], input_lengths=[2, 0, 1], num_prompt_tokens=[1, 0, 1])
    assert (histories(job), job.num_prompt_tokens) == ([[1, 2], [], [3]], (1, 0, 1))


def test_rows_may_have_no_history():
    assert histories(parse(np.repeat(LOGITS, 3, 0))) == [[], [], []]


def test_the_model_s_end_ids_count_unless_others_are_given():
    assert parse(eos_ids=(2, 99)).eos_ids == (2,)
    assert parse(eos_ids=(2,), end_id=[3, 4]).eos_ids == (3, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logits": np.zeros((1, 1, 4), np.float32)}, r"logits: float32 of shape \[1, 1, 4\]; send FP32"),
        ({"logits": np.zeros((1, 4), np.float64)}, "logits: float64"),
        ({"logits": np.zeros((0, 4), np.float32)}, r"shape \[0, 4\]"),
        (
            {"logits": np.zeros((9, 4), np.float32), "limits": Limits(max_logits_bytes=100)},
            "144 bytes; limits.max_logits_bytes is 100",
        ),
        ({"processors": b"["}, "processors: .*send a JSON list"),
        ({"processors": b"\xff"}, "processors: "),
        ({"processors": {"name": "top_k"}}, "Expected `array`"),
        ({"processors": [{"args": {}}]}, "missing required field `name`"),
        ({"processors": TEMPERATURE * 9}, "9 of them; limits.max_logits_processors is 8"),
        ({"input_ids": [10]}, "input_ids: 10 is not in the vocabulary, 0 to 9"),
        ({"input_ids": [-1]}, "input_ids: -1"),
        ({"input_lengths": [1]}, "1 lengths, in all 1, for 1 rows and 0 input_ids"),
        ({"input_ids": [1, 2], "input_lengths": [3, -1]}, "send one length a row"),
        ({"logits": np.repeat(LOGITS, 2, 0), "input_ids": [1]}, "input_lengths: missing; 2 rows"),
        ({"num_prompt_tokens": [1]}, "num_prompt_tokens: 1 of a history of 0"),
        ({"num_prompt_tokens": [0, 0]}, "2 values for 1 rows"),
        ({"end_id": [10]}, "end_id: 10 is not in the vocabulary"),
        ({"input_id": [1]}, "input_id: logits_processor has no such input; did you mean input_ids"),
    ],
)
def test_a_wrong_tensor_is_refused_with_value_and_remedy(given, message):
    with pytest.raises(RequestError, match=message):
        parse(**given)


@pytest.mark.parametrize("missing", ["logits", "processors"])
def test_a_missing_tensor_is_named(missing):
    inputs = tensors()
    del inputs[missing]
    with pytest.raises(RequestError, match=f"{missing}: "):
        parse_job(inputs, Limits())


def test_end_ids_are_read_from_the_model_s_folder(tmp_path):
    recipe = Recipe(model=str(tmp_path), workers={})
    assert eos_ids_of(recipe) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert eos_ids_of(recipe) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert eos_ids_of(recipe) == (2, 7)


class Client:
    def __init__(self):
        self.futures = []

    def submit(self, job):
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
async def stage():
    stage = LogitsProcessor()
    await stage.start(
        StageContext("logits_processor", Recipe(model="x", workers={}), None, Registry("logits_processor"))
    )
    yield stage
    await stage.stop()


async def test_a_cancelled_request_that_waits_is_taken_out_of_the_queue(stage):
    stage._client = Client()
    cancelled = Cancelled()
    task = asyncio.ensure_future(stage.handle(tensors(), lambda response: None, cancelled))
    await asyncio.sleep(0)
    cancelled.set()
    with pytest.raises(RequestCancelledError):
        await asyncio.wait_for(task, 5)
    stage._client = type("Stopped", (), {"stop": lambda self: None})()


async def test_the_answer_has_the_shape_of_the_question(stage):
    sent = []
    await stage.handle(tensors(np.repeat(LOGITS, 2, 0)), sent.append, Cancelled())
    answer = sent[0].tensors()["logits"]
    assert answer.dtype == np.float32 and np.array_equal(answer, np.repeat(LOGITS / np.float32(0.5), 2, 0))


async def test_a_stage_that_never_started_stops():
    await LogitsProcessor().stop()
