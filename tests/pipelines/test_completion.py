"""completion: one response; both peers' contracts."""

import json

import pytest

from bireme.errors import RequestError
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
    call = await answer(await completion(), return_logprobs=True)
    assert json.loads(call.last("logprobs")[0]) is None  # the fake makes none


async def test_vllm_finish_reason_is_none_until_the_end(bench):
    test = await bench()
    call = test.ask(stream=True, sampling_parameters='{"max_tokens": 4}')
    await test.workers.emit(4)
    await call.end()
    assert [response["finish_reason"].tolist() for response in call.responses[:2]] == [[b"None"], [b"None"]]
    assert call.last("finish_reason") == [b"length"]
