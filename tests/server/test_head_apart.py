"""An EAGLE-3 head where prefill and decode are apart: decode drafts from a stream's first tokens on, as one engine."""

import json

import pytest
from transformers import AutoTokenizer

from bireme.config import CHECKOUT
from models.training.chat_world import examples
from tests.server.conftest import Reference
from tests.server.triton_client import Client
from tests.server.watch import is_idle, total, until

pytestmark = pytest.mark.server
MODEL = CHECKOUT / "models" / "tiny-chat"
DRAFTS = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": str(MODEL / "eagle3")}
LENGTH = "bireme_accepted_draft_length_"  # whose parts are counters to Triton: the parser adds `_total`
BLOCK = 256  # more than a prompt and its answer: what is not transferred no later block makes up for


def worker(**more):
    memory = {"tokens_per_block": BLOCK, "max_tokens": 8 * BLOCK}
    config = {"dtype": "float32", "max_num_tokens": 512, "max_seq_len": 1024, "kv_cache_config": memory, **more}
    return {
        "engine": "torch",
        "num_threads": 1,
        "engine_config": config | {"cache_transceiver_config": {"backend": "DEFAULT"}},
    }


@pytest.fixture
def serve(write_recipe, start):
    """Return what starts a server: with the head on prefill or without it."""

    def served(**of_prefill):
        workers = {"prefill": worker(**of_prefill), "decode": worker(speculative_config=DRAFTS)}
        return start(write_recipe(MODEL, workers), env={"BIREME_KEY": "ab" * 32})

    return served


@pytest.fixture(scope="module")
def stories():
    """Return ids of prompts, and what the model says."""
    tokenizer, plain = AutoTokenizer.from_pretrained(MODEL), Reference(MODEL)
    plain.model.generation_config.eos_token_id, plain.eos_ids = None, set()
    asked = [
        tokenizer.apply_chat_template(task.messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for task in examples(5, 12, True, ("story",))
    ]
    return [(prompt, plain.greedy(prompt, 60)) for prompt in asked]


def ask(server, prompt):
    fields = {"input_ids": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True}
    answers = list(Client(server.grpc).stream("generate", 300, **fields))
    usage = json.loads(answers[-1]["usage"])
    assert usage["prefill_worker"] == "prefill"
    return [token for answer in answers for token in answer.get("output_ids", [])], usage


def test_a_step_with_drafts_says_as_many_tokens_as_in_one_engine(serve, stories):
    """Drafts that lose time on this machine are tried seldom: it is asked until there were enough."""
    server, drafted = serve(speculative_config=DRAFTS), 0
    for prompt, tokens in stories * 20:
        said, usage = ask(server, prompt)
        assert said == tokens
        if (drafted := drafted + usage["drafted_tokens"]) > 60:
            break
    assert drafted > 60
    until(lambda: total(server, "bireme_draft_tokens_total") >= drafted, 30, "all drafts are told")
    accepted = total(server, "bireme_accepted_draft_tokens_total", worker="decode")
    until(lambda: total(server, LENGTH + "sum_total") >= accepted, 30, "each draft is told")
    assert 1 + accepted / total(server, LENGTH + "count_total") > 1.6
    assert total(server, "bireme_head_imports_total", rows="whole") > 0
    assert total(server, "bireme_head_imports_total", rows="missing") == 0
    until(lambda: is_idle(server), 30, "nothing left behind")


def test_a_prefill_worker_without_the_head_is_not_refused(serve, stories):
    server = serve()
    for prompt, tokens in stories[:3]:
        assert ask(server, prompt)[0] == tokens
    until(lambda: total(server, "bireme_head_imports_total", rows="missing") == 3, 30, "each is told")
    until(lambda: is_idle(server), 30, "nothing left behind")
