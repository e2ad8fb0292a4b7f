"""SmolLM2-135M-Instruct in float32, prefill and decode apart, against transformers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import openai
import pytest

from tools import real_model

pytestmark = pytest.mark.real
TEXT = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
MAX_TOKENS = 16
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(chat_url):
    with openai.OpenAI(base_url=f"{chat_url}/v1", api_key="none") as made:
        yield made


@pytest.fixture(scope="module")
def model(client):
    (found,) = client.models.list().data
    return found.id


@pytest.fixture(scope="module")
def prompts(reference):
    """Real text of 10 to 900 tokens, each prompt from another place."""
    ids = reference.ids(TEXT)
    lengths = (10, 20, 31, 32, 33, 50, 65, 100, 200, 300, 450, 900)
    return [reference.tokenizer.decode(ids[place : place + n]) for place, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def complete(client, model):
    def ask(prompt):
        return client.completions.create(model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0)

    return ask


def test_greedy_texts_are_those_of_transformers_alone_from_reused_blocks_and_at_once(reference, prompts, complete):
    prompt_ids = [reference.ids(prompt) for prompt in prompts]
    wanted = [reference.text(ids, MAX_TOKENS) for ids in prompt_ids]
    fresh = [complete(prompt) for prompt in prompts]
    assert [one.choices[0].text for one in fresh] == wanted
    assert [one.usage.prompt_tokens for one in fresh] == [len(ids) for ids in prompt_ids]
    assert [complete(prompt).choices[0].text for prompt in prompts] == wanted
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert [one.choices[0].text for one in pool.map(complete, prompts)] == wanted


@pytest.fixture(scope="module")
def wanted_answer(reference):
    answer = reference.text(reference.chat_ids(QUESTION), MAX_TOKENS)
    assert "Paris" in answer
    return answer


def test_a_chat_completion_is_what_transformers_makes_of_the_template(client, model, wanted_answer):
    asked = {"model": model, "messages": QUESTION, "max_tokens": MAX_TOKENS, "temperature": 0}
    assert client.chat.completions.create(**asked).choices[0].message.content == wanted_answer
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == wanted_answer


def test_a_response_is_the_same_and_the_next_turn_knows_it(client, model, wanted_answer, reference):
    asked = {"model": model, "max_output_tokens": MAX_TOKENS, "temperature": 0}
    first = client.responses.create(**asked, input=QUESTION)
    assert first.output_text == wanted_answer
    with client.responses.stream(**asked, input=QUESTION) as events:
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted_answer
    second = {"role": "user", "content": "Which river is in it?"}
    history = [*QUESTION, {"role": "assistant", "content": wanted_answer}, second]
    answer = client.responses.create(**asked, input=[second], previous_response_id=first.id)
    assert answer.output_text == reference.text(reference.chat_ids(history), MAX_TOKENS)


def test_a_message_is_the_same_with_a_system_prompt_as_well(chat_url, model, wanted_answer, reference):
    asked = {"model": model, "messages": QUESTION, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
    system = {"role": "system", "content": "Answer as a pirate."}
    with anthropic.Anthropic(base_url=chat_url, api_key="none") as client:
        assert client.messages.create(**asked).content[0].text == wanted_answer
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == wanted_answer
        answer = client.messages.create(**asked, system=system["content"]).content[0].text
    assert answer == reference.text(reference.chat_ids([system, *QUESTION]), MAX_TOKENS)


@pytest.mark.parametrize("context", ["The capital of France is", TEXT[:1500] + "\nThe capital of France is"])
def test_log_likelihoods_are_those_of_transformers(client, model, reference, context):
    """As lm-eval's local-completions asks: ids in, `echo`, one token more, which it leaves out."""
    sums = {}
    for continuation in (" Paris", " Berlin", " a kind of bread"):
        ids = reference.ids(context + continuation)
        start = len(reference.ids(context))
        answer = client.completions.create(
            model=model, prompt=ids, echo=True, max_tokens=1, logprobs=1, temperature=0, seed=1234
        )
        told = answer.choices[0].logprobs
        found, best = told.token_logprobs[1:-1], [max(top.values()) for top in told.top_logprobs[1:-1]]
        own, own_best = reference.log_probabilities(ids)
        assert found == pytest.approx(own, abs=1e-3) and best == pytest.approx(own_best, abs=1e-3)
        sums[continuation] = sum(found[start - 1 :])
        assert (found[start - 1 :] == best[start - 1 :]) == (own[start - 1 :] == own_best[start - 1 :])
    assert max(sums, key=sums.__getitem__) == " Paris"


def test_the_demo_prints_its_answers_and_keeps_the_conversation(chat_url, capsys):
    real_model.chat(chat_url, ["What is the capital of France?", "What did I ask?"], goes_on=False)
    told = capsys.readouterr()
    assert "is Paris." in told.out and told.out.count("capital of France") == 2  # the second knows the first
    assert told.err.count("\n> ") == 2
