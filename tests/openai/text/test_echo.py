"""/v1/completions with echo: the prompt in the answer, with log probabilities, as scoring programs read them."""

import pytest

from bireme.workers.fake import token_at

TOGETHER = {"workers": {"decode": {"engine": "mocker"}}}
APART = {"workers": {"prefill": {"engine": "mocker"}, "decode": {"engine": "mocker"}}}


async def complete(bench, emit=1, **fields):
    reply = bench.complete(**fields)
    await bench.workers.emit(emit)
    return await reply.end()


def scores(token, top=1):
    """Return what fake workers say of a token."""
    return {chr(token): -0.5} | {chr(token + at): -1.0 - at for at in range(1, top)}


@pytest.mark.parametrize("workers", [TOGETHER, APART], ids=["aggregated", "disaggregated"])
@pytest.mark.parametrize("prompt", ["hiya", [104, 105, 121, 97]], ids=["text", "ids"])
async def test_an_echoed_prompt_has_log_probabilities(frontend, prompt, workers):
    bench = await frontend(**workers)
    reply = await complete(bench, prompt=prompt, echo=True, logprobs=2, max_tokens=1)
    choice = reply.json()["choices"][0]
    following = token_at([104, 105, 121, 97], 0)
    columns = choice["logprobs"]
    assert choice["text"] == "hiya" + chr(following) == "".join(columns["tokens"])
    assert columns["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert columns["top_logprobs"] == [None, *(scores(token, 2) for token in (105, 121, 97, following))]
    assert columns["text_offset"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [TOGETHER, APART], ids=["aggregated", "disaggregated"])
async def test_max_tokens_0_answers_with_the_prompt_alone(frontend, workers):
    reply = await complete(await frontend(**workers), prompt="hi", echo=True, logprobs=1, max_tokens=0)
    (choice,) = reply.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert reply.json()["usage"]["completion_tokens"] == 0


async def test_max_tokens_0_without_log_probabilities_is_the_prompt(frontend):
    reply = await complete(await frontend(), prompt="hi", echo=True, max_tokens=0)
    assert reply.json()["choices"][0]["text"] == "hi"


@pytest.mark.parametrize(("max_tokens", "text"), [(0, "hi"), (2, None)])
async def test_streams_begin_with_the_scored_prompt(frontend, max_tokens, text):
    bench = await frontend()
    reply = await complete(bench, 2, prompt="hi", echo=True, logprobs=1, max_tokens=max_tokens, stream=True)
    choices = [event["choices"][0] for event in reply.events()[:-1]]
    made = "".join(chr(token_at([104, 105], at)) for at in range(2))
    assert "".join(choice["text"] for choice in choices) == (text or "hi" + made)
    logprobs = [value for choice in choices for value in (choice["logprobs"] or {}).get("token_logprobs", [])]
    assert logprobs == [None, *[-0.5] * (1 + max_tokens)]
    assert choices[-1]["finish_reason"] == "length"


async def test_prompts_of_a_batch_and_their_copies_are_scored_each(frontend):
    bench = await frontend()
    reply = bench.complete(prompt=["ab", "xyz"], n=2, echo=True, logprobs=0, max_tokens=0)
    while len(bench.workers.running) < 4:
        await bench.workers.reached("decode")
    await bench.workers.emit(1)
    choices = (await reply.end()).json()["choices"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["a", "b"]] * 2 + [["x", "y", "z"]] * 2


async def test_a_prompt_of_one_token_has_nothing_to_predict(frontend):
    reply = await complete(await frontend(), prompt="a", echo=True, logprobs=1, max_tokens=0)
    assert reply.json()["choices"][0]["logprobs"]["token_logprobs"] == [None]


async def test_the_token_after_a_scored_prompt_always_comes(frontend):
    bench = await frontend()
    reply = bench.complete(prompt="hi", echo=True, logprobs=1, max_tokens=1)
    await bench.workers.reached("decode")
    assert bench.workers.running[0].request.sampling.ignore_eos
    await bench.workers.emit(1)
    await reply.end()
