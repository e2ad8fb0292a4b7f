"""tensorrt_llm_bls: batches, shapes and refusals of tensorrtllm_backend's contract."""

import numpy as np
import pytest

from bireme.errors import RequestError
from bireme.pipelines.tensorrt_llm_bls import TensorrtLlmBls
from bireme.workers.fake import token_at


def answer_to(text, count=4):
    return "".join(chr(token_at([ord(letter) for letter in text], position)) for position in range(count))


async def ask(bench, *texts, **values):
    test = await bench(TensorrtLlmBls)
    columns = {name: [[value]] * len(texts) for name, value in values.items()}
    call = test.ask(text_input=[[text] for text in texts], **({"max_tokens": [[4]] * len(texts)} | columns))
    return test, call


async def run(bench, *texts, **values):
    test, call = await ask(bench, *texts, **values)
    while not call.task.done() and len(test.workers.running) < len(texts):
        await test.workers.emit(0)
    await test.workers.emit(4)
    await call.end()
    return call.responses


async def test_a_whole_answer_comes_with_its_prompt_and_places_of_shape_1_1(bench):
    (response,) = await run(bench, "hi")
    assert response["text_output"].tolist() == [("hi" + answer_to("hi")).encode()]
    assert response["batch_index"].tolist() == response["sequence_index"].tolist() == [[0]]


async def test_the_prompt_is_left_out_when_asked(bench):
    (response,) = await run(bench, "hi", exclude_input_in_output=True)
    assert response["text_output"].tolist() == [answer_to("hi").encode()]


async def test_a_stream_sends_deltas_without_the_prompt(bench):
    responses = await run(bench, "hi", stream=True, exclude_input_in_output=False)
    assert b"".join(response["text_output"][0] for response in responses).decode() == answer_to("hi")
    assert len(responses) >= 4


async def test_each_row_of_a_batch_is_answered_by_its_index(bench):
    responses = await run(bench, "hi", "ho", exclude_input_in_output=True)
    found = {int(response["batch_index"][0, 0]): response["text_output"][0].decode() for response in responses}
    assert found == {0: answer_to("hi"), 1: answer_to("ho")}


async def test_sequences_of_a_row_are_told_apart(bench):
    responses = await run(bench, "hi", num_return_sequences=2)
    assert sorted(int(response["sequence_index"][0, 0]) for response in responses) == [0, 1]


async def test_without_top_k_and_top_p_a_request_is_greedy_as_in_tensorrt_llm(bench):
    test, call = await ask(bench, "hi", temperature=1.0)
    await test.workers.emit(0)
    assert test.workers.running[0].request.sampling.temperature is None
    await test.workers.emit(4)
    await call.end()


async def test_min_length_of_older_clients_is_min_tokens(bench):
    test, call = await ask(bench, "hi", min_length=2)
    await test.workers.emit(0)
    assert test.workers.running[0].request.sampling.min_tokens == 2
    await test.workers.emit(4)
    await call.end()


async def test_log_probabilities_have_the_backend_s_shapes(bench):
    (response,) = await run(bench, "hi", return_log_probs=True)
    assert response["cum_log_probs"].shape == (1, 1) and response["output_log_probs"].ndim == 3


async def test_what_became_of_drafts_is_told_when_asked_with_the_end_of_each_sequence(bench):
    test, call = await ask(bench, "hi", stream=True, return_perf_metrics=True)
    await test.workers.emit(0)
    test.workers.drafts = (8, 3)
    await test.workers.emit(4)
    await call.end()
    *before, last = call.responses
    assert before and not any("acceptance_rate" in response for response in before)
    assert last["acceptance_rate"].tolist() == [[0.375]] and last["acceptance_rate"].dtype == np.float32
    assert (last["total_accepted_draft_tokens"].tolist(), last["total_draft_tokens"].tolist()) == ([[3]], [[8]])


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("beam_width", 2, "num_return_sequences"),
        ("return_context_logits", True, "prompt_logprobs"),
        ("image_url_input", "http://a", "chat"),
        ("num_draft_tokens", 3, "speculative_config"),
        ("lora_task_id", 7, "lora_name"),
        ("prompt_table_extra_id", 7, "cache_salt"),
    ],
)
async def test_what_can_not_be_served_is_refused_by_name_with_a_remedy(bench, name, value, remedy):
    with pytest.raises(RequestError, match=rf"{name}: {value}; .*{remedy}"):
        _, call = await ask(bench, "hi", **{name: value})
        await call.end()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 1), ("length_penalty", 1.0), ("return_context_logits", False), ("num_draft_tokens", 0),
        ("pad_id", 2), ("decoder_text_input", ""), ("use_draft_logits", False),
    ],
)  # fmt: skip
async def test_a_neutral_value_is_taken(bench, name, value):
    assert len(await run(bench, "hi", **{name: value})) == 1


async def test_words_of_a_row_are_its_own_and_padding_is_none(bench):
    stop = answer_to("hi")[1]
    test = await bench(TensorrtLlmBls)
    call = test.ask(text_input=[["hi"], ["ho"]], max_tokens=[[4], [4]], stop_words=[[stop, ""], ["", ""]])
    while len(test.workers.running) < 2:
        await test.workers.emit(0)
    assert [one.request.sampling.stop for one in test.workers.running] == [(stop,), ()]
    await test.workers.emit(4)
    await call.end()


async def test_a_text_without_the_batch_dimension_is_refused_with_its_shape(bench):
    test = await bench(TensorrtLlmBls)
    with pytest.raises(RequestError, match=r"text_input: shape \[1\]; .*shape \[batch, 1\]"):
        await test.ask(text_input=["hi"], max_tokens=[[4]]).end()


async def test_a_row_too_few_is_refused_by_name(bench):
    test = await bench(TensorrtLlmBls)
    with pytest.raises(RequestError, match="max_tokens: .*the batch has 2 rows"):
        await test.ask(text_input=[["hi"], ["ho"]], max_tokens=np.array([[4]])).end()
