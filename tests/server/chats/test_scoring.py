"""What /v1/completions says of an echoed prompt agrees with what it says while it generates the same tokens."""

import json
import urllib.error
import urllib.request

import pytest

pytestmark = pytest.mark.server
TEXT = "One day"


@pytest.fixture
def is_trtllm(request, tiny_chat):
    return request.node.callspec.params["tiny_chat"][0] == "trtllm"


def complete(served, **fields):
    body = json.dumps({"model": "tiny-chat", "temperature": 0, **fields}).encode()
    request = urllib.request.Request(f"{served.url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return json.load(error)


def test_a_prompt_is_scored_as_it_was_generated(tiny_chat, is_trtllm):
    if is_trtllm:
        pytest.skip("TensorRT-LLM does not score prompts")
    made = complete(tiny_chat, prompt=TEXT, max_tokens=6, logprobs=2, ignore_eos=True)["choices"][0]
    reply = complete(tiny_chat, prompt=TEXT + made["text"], max_tokens=1, logprobs=2, echo=True)
    (choice,) = reply["choices"]
    scored, count = choice["logprobs"], len(made["logprobs"]["tokens"])
    assert scored["token_logprobs"][0] is None and choice["text"].startswith(TEXT + made["text"])
    assert scored["tokens"][-1 - count : -1] == made["logprobs"]["tokens"]
    assert scored["token_logprobs"][-1 - count : -1] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)
    best = [max(top.values()) for top in scored["top_logprobs"][-1 - count : -1]]
    assert best == scored["token_logprobs"][-1 - count : -1]  # greedy, and told so
    for token, at in zip(scored["tokens"], scored["text_offset"], strict=True):
        assert token.startswith(("bytes:", "<")) or choice["text"][at:].startswith(token)


def test_a_prompt_alone_is_scored_or_the_reason_named(tiny_chat, is_trtllm):
    reply = complete(tiny_chat, prompt=[TEXT, "Two"], max_tokens=0, logprobs=1, echo=True)
    if is_trtllm:
        assert "TensorRT-LLM gives log probabilities of the likeliest" in reply["error"]["message"]
        return
    assert [choice["text"] for choice in reply["choices"]] == [TEXT, "Two"]
    assert reply["usage"]["completion_tokens"] == 0
