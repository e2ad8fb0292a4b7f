"""completion: one response; both peers' contracts."""

import json

import pytest

from bireme.errors import RequestError
from bireme.messages import TokenLogprob
from bireme.pipelines.answers import vllm_logprobs
from bireme.text.output import TokenDelta
from bireme.types import RequestInfo
from bireme.workers.fake import token_at

EXPECTED = "".join(chr(token_at([ord("h"), ord("i")], position)) for position in range(4))


async def answer(test, **values):
    call = test.ask(**values)
    await test.workers.emit(4)
    await call.end()
    assert len(call.responses) == 1
    return call


async def test_whole_text_comes_in_one_response(completion):
    assert (await answer(await completion())).text == EXPECTED


async def test_stream_is_not_an_input(completion):
    test = await completion()
    with pytest.raises(RequestError, match="stream: completion has no such input"):
        await test.ask(stream=True).end()


async def test_vllm_contract_echoes_the_prompt(completion):
    call = await answer(await completion(), sampling_parameters='{"max_tokens": "4"}')
    assert call.text == "hi" + EXPECTED


async def test_vllm_contract_without_echo_when_asked(completion):
    call = await answer(await completion(), sampling_parameters="{}", exclude_input_in_output=True)
    assert call.text == EXPECTED


async def test_trtllm_contract_echoes_only_when_asked(completion):
    call = await answer(await completion(), exclude_input_in_output=False)
    assert call.text == "hi" + EXPECTED


async def test_extras_come_only_when_requested(completion):
    call = await answer(await completion(), return_num_input_tokens=True)
    assert call.last("num_input_tokens") == [2]
    assert "num_output_tokens" not in call.responses[0]


async def test_vllm_logprobs_are_json(completion):
    call = await answer(await completion(), return_logprobs=True, sampling_parameters='{"logprobs": 0}')
    places = json.loads(call.last("logprobs")[0])
    assert [[entry["rank"] for entry in place.values()] for place in places] == [[1]] * len(EXPECTED)


@pytest.mark.parametrize("asked", [{}, {"return_cumulative_logprob": True}])
async def test_vllm_logprobs_are_null_unless_the_sampling_parameters_ask_for_some(completion, asked):
    call = await answer(await completion(), return_logprobs=True, sampling_parameters="{}", **asked)
    assert call.last("logprobs") == [b"null"]
    assert not asked or call.last("cumulative_logprob")[0] < 0


async def test_vllm_finish_reason_is_none_until_the_end(bench):
    test = await bench()
    call = test.ask(stream=True, sampling_parameters='{"max_tokens": 4}', return_finish_reason=True)
    await test.workers.emit(4)
    await call.end()
    assert [response["finish_reason"].tolist() for response in call.responses[:2]] == [[b"None"], [b"None"]]
    assert call.last("finish_reason") == [b"length"]


@pytest.mark.parametrize(
    "asked",
    [
        {"sampling_parameters": "{}"},
        {"return_finish_reason": False},
        {"return_finish_reason": True},
        {"return_logprobs": True, "return_cumulative_logprob": True, "return_num_input_tokens": True},
        {"sampling_parameters": "{}", "return_num_output_tokens": True},
    ],
    ids=str,
)
async def test_vllm_contract_sends_the_outputs_that_were_asked_for_and_no_others(completion, asked):
    call = await answer(await completion(), **asked)
    wanted = {name.removeprefix("return_") for name, value in asked.items() if value is True}
    assert call.responses[0].keys() == {"text_output"} | wanted


async def test_vllm_contract_sends_our_own_outputs_to_who_names_them(completion):
    info = RequestInfo(outputs=frozenset({"text_output", "usage", "output_ids"}))
    call = await answer(await completion(), info=info, sampling_parameters="{}")
    assert {"text_output", "usage", "output_ids"} <= call.responses[0].keys()


async def test_the_sum_of_log_probabilities_asks_the_engine_for_them(completion):
    test = await completion()
    call = test.ask(return_cumulative_logprob=True)
    await test.workers.emit(0)
    assert test.workers.running[0].request.sampling.logprobs == 0
    await test.workers.emit(4)
    await call.end()


async def test_a_chosen_token_that_is_not_among_the_likeliest_has_its_rank():
    entry = [TokenLogprob(65, -4.0, 17), TokenLogprob(66, -0.5, 1), TokenLogprob(67, -1.5, 2)]
    shown = json.loads(vllm_logprobs(TokenDelta([65], logprobs=[entry]), chr))
    assert [item["rank"] for item in shown[0].values()] == [17, 1, 2]


async def test_without_ranks_from_the_engine_places_are_the_likeliest_tokens_own():
    entry = [TokenLogprob(65, -4.0), TokenLogprob(66, -0.5), TokenLogprob(67, -1.5)]
    shown = json.loads(vllm_logprobs(TokenDelta([65], logprobs=[entry]), chr))
    assert [item["rank"] for item in shown[0].values()] == [None, 1, 2]
