import json

import numpy as np
import pytest

from bireme.config import Limits, Recipe
from bireme.errors import RequestCancelledError, RequestError, ResourceExhaustedError
from bireme.metrics import Registry
from bireme.specs import TOKENIZER
from bireme.stages.tokenizer import Tokenizer
from bireme.text.tokenizer import load_tokenizer
from bireme.types import Cancelled, StageContext


@pytest.fixture(scope="module")
def loaded(sample_model):
    return load_tokenizer(str(sample_model("llama")))


@pytest.fixture
async def stage(loaded):
    async for made in started(loaded):
        yield made


async def started(loaded, **limits):
    stage = Tokenizer(loaded)
    recipe = Recipe(model="m", workers={}, limits=Limits(**limits))
    await stage.start(StageContext("tokenizer", recipe, None, Registry()))
    yield stage
    await stage.stop()


def bytes_tensors(**texts):
    return {
        name: np.array([text if isinstance(text, bytes) else text.encode()], np.object_) for name, text in texts.items()
    }


async def call(stage, cancelled=None, **texts):
    answers = []
    await stage.handle(bytes_tensors(**texts), answers.append, cancelled or Cancelled())
    outputs = answers[0].tensors()
    return outputs["input_ids"].tolist(), outputs["prompt"][0].decode()


async def test_text_becomes_ids_with_bos(stage, loaded):
    ids, prompt = await call(stage, text_input="hello 東京")
    assert (ids, prompt) == (loaded.encode("hello 東京"), "hello 東京")
    assert ids[0] == loaded.token_id("<s>")


async def test_a_long_text_is_encoded_too(stage, loaded):
    text = "hello " * 5000
    assert (await call(stage, text_input=text))[0] == loaded.encode(text)


async def test_a_conversation_becomes_ids(stage):
    ids, prompt = await call(stage, messages='[{"role": "user", "content": "hi"}]')
    assert prompt == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" and len(ids) > 5


async def test_control_tokens_in_a_conversation_are_text(stage, loaded):
    ends = [
        (await call(stage, messages=json.dumps([{"role": "user", "content": text}])))[0].count(
            loaded.token_id("<|im_end|>")
        )
        for text in ("hi", "hi<|im_end|>")
    ]
    assert ends == [1, 1]


async def test_tools_and_template_variables_are_used(stage):
    messages = '[{"role": "user", "content": "hi"}]'
    _, prompt = await call(
        stage, messages=messages, tools='[{"type": "x"}]', chat_template_kwargs='{"add_generation_prompt": false}'
    )
    assert '{"type": "x"}' in prompt and not prompt.endswith("assistant\n")


async def test_outputs_are_those_of_the_model(stage):
    answers = []
    await stage.handle(bytes_tensors(text_input="a"), answers.append, Cancelled())
    outputs = answers[0].tensors()
    assert set(outputs) == {spec.name for spec in TOKENIZER.outputs} and outputs["input_ids"].dtype == np.int32


USER = '[{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, "send text_input, or messages"),
        ({"text_input": "a", "messages": USER}, "both given"),
        ({"text_input": ""}, "empty"),
        ({"text_input": b"\xff"}, "not UTF-8"),
        ({"text_input": "a", "tools": "[]"}, "goes with messages only"),
        ({"messages": "[]"}, "at least one message"),
        ({"messages": "{"}, "not valid JSON"),
        ({"messages": "[" * 100_000}, "not valid JSON"),
        ({"messages": '{"role": "user"}'}, "list of objects"),
        ({"messages": '[{"content": "hi"}]'}, r"messages\[0\].role"),
        ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, "lone surrogate"),
        ({"messages": '[{"role": "wizard", "content": "hi"}]'}, "unknown role wizard"),
        ({"messages": USER, "tools": '"x"'}, "list of objects"),
        ({"messages": USER, "chat_template_kwargs": "[]"}, "JSON object"),
        ({"messages": USER, "chat_template_kwargs": '{"chat_template": "x"}'}, "can't be set"),
        ({"text": "a"}, "no such input"),
    ],
)
async def test_bad_input_is_refused_with_the_reason(stage, texts, message):
    with pytest.raises(RequestError, match=message):
        await call(stage, **texts)


@pytest.mark.parametrize(
    "texts", [{"text_input": "é" * 60}, {"messages": '[{"role":"user","content":"%s"}]' % ("x" * 100)}]
)
async def test_a_prompt_over_the_limit_is_refused(loaded, texts):
    async for stage in started(loaded, max_prompt_bytes=100):
        with pytest.raises(RequestError, match="limits.max_prompt_bytes is 100"):
            await call(stage, **texts)


async def test_too_many_waiting_requests_are_refused(loaded):
    async for stage in started(loaded, max_concurrent_requests=0):
        with pytest.raises(ResourceExhaustedError, match="try again"):
            await call(stage, messages=json.dumps([{"role": "user", "content": "x" * 5000}]))


async def test_a_cancelled_request_is_not_encoded(stage):
    cancelled = Cancelled()
    cancelled.set()
    with pytest.raises(RequestCancelledError):
        await call(stage, cancelled, messages=json.dumps([{"role": "user", "content": "hi"}]))


async def test_a_stage_loads_the_recipes_tokenizer_at_start(sample_model):
    stage = Tokenizer()
    assert not stage.is_ready()
    recipe = Recipe(model=str(sample_model("llama")), workers={})
    await stage.start(StageContext("tokenizer", recipe, None, Registry()))
    assert stage.is_ready() and await call(stage, text_input="a")
    await stage.stop()
    assert not stage.is_ready()


@pytest.mark.parametrize(
    "texts", [{"text_input": " " * 2000}, {"messages": json.dumps([{"role": "user", "content": "x" * 2000}])}]
)
async def test_a_text_that_cannot_fit_is_refused_without_encoding_it(texts):
    async for stage in started(load_tokenizer("models/tiny-chat"), max_prompt_tokens=100):
        with pytest.raises(RequestError, match=r"\d+ bytes; 100 tokens \(limits.max_prompt_tokens\) hold 1200 at most"):
            await call(stage, **texts)
