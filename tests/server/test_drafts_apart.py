"""Drafts of n-grams where prefill and decode are apart: reuse, host tier, preemption, priorities and lost engines."""

import json
import os
import random
import signal
import threading
import time

import pytest
from tokenizers import Tokenizer

from bireme.config import CHECKOUT
from models.training.chat_world import word
from tests.server.conftest import Reference
from tests.server.triton_client import Client
from tests.server.watch import is_idle, total, until

pytestmark = [pytest.mark.server, pytest.mark.flaky(reruns=1)]
MODEL = CHECKOUT / "models" / "tiny-chat"
BLOCK, CONCURRENCY, LENGTH, LONG = 16, 6, 100, 280
DRAFTS = {"decoding_type": "NGram", "max_draft_len": 6, "max_concurrency": CONCURRENCY}


def prompts(count):
    """Return the ids of questions whose answers repeat a word for as long as one lets them."""
    tokenizer, rng = Tokenizer.from_file(str(MODEL / "tokenizer.json")), random.Random(2)
    words = [word(rng) for _ in range(count)]
    texts = [
        f"<|im_start|>user\nSay {one} five times.<|im_end|>\n<|im_start|>assistant\n" + " ".join([one] * (8 + at))
        for at, one in enumerate(words)
    ]
    return [tokenizer.encode(text).ids for text in texts]


PROMPTS = prompts(12)


def config(max_tokens, **more):
    memory = {"tokens_per_block": BLOCK, "max_tokens": max_tokens, "host_cache_size": 16 << 20}
    return {
        "dtype": "float32",
        "max_batch_size": 16,
        "max_num_tokens": 128,
        "max_seq_len": 1024,
        "kv_cache_config": memory,
        "cache_transceiver_config": {"backend": "DEFAULT"},
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        **more,
    }


@pytest.fixture(scope="module")
def server(write_recipe, start):
    """Prefill drafts nothing; decode has room for four of twelve requests, and an engine that comes back."""
    workers = {
        "prefill": {"engine": "torch", "num_threads": 1, "engine_config": config(512)},
        "decode": {"engine": "torch", "num_threads": 1, "engine_config": config(1024, speculative_config=DRAFTS)},
    }
    heals = {"supervisor": {"max_restarts": 50}, "pipeline": {"stall_timeout_s": 90}}
    return start(write_recipe(MODEL, workers, **heals), env={"BIREME_KEY": "ab" * 32})


@pytest.fixture(scope="module")
def expected():
    plain = Reference(MODEL)
    plain.model.generation_config.eos_token_id, plain.eos_ids = None, set()
    return [plain.greedy(prompt, LENGTH) for prompt in PROMPTS]


class Run:
    """Streams side by side, on threads: the tokens that each has got, and its usage."""

    def __init__(self, server, prompts, max_tokens=LENGTH, **fields):
        self.tokens = [[] for _ in prompts]
        self.usages = [None for _ in prompts]
        self.deltas = [0 for _ in prompts]
        self.errors = []
        self._threads = [
            threading.Thread(target=self._read, args=(server, at, prompt, max_tokens, fields))
            for at, prompt in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, server, at, prompt, max_tokens, fields):
        own = {name: values[at] for name, values in fields.items()}
        own |= {"input_ids": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        try:
            for answer in Client(server.grpc).stream("generate", 300, **own):
                self.deltas[at] += 1
                self.tokens[at] += answer.get("output_ids", [])
                self.usages[at] = json.loads(answer["usage"]) if "usage" in answer else None
        except Exception as error:
            self.errors.append(error)

    def join(self):
        for thread in self._threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in self._threads), "a stream hangs"
        assert not self.errors
        return self.tokens

    def accepted(self):
        return [usage.get("accepted_tokens", 0) for usage in self.usages]


def test_what_prefill_began_decode_drafts_and_says_the_same(server, expected):
    for prompt, tokens in list(zip(PROMPTS, expected, strict=True))[:CONCURRENCY]:
        run = Run(server, [prompt])
        assert run.join() == [tokens]
        [usage], [accepted], [deltas] = run.usages, run.accepted(), run.deltas
        assert usage["prefill_worker"] == "prefill" and usage["completion_tokens"] == len(tokens)
        assert deltas <= len(tokens) - accepted + 1
    assert total(server, "bireme_accepted_draft_tokens_total", worker="prefill") == 0
    until(lambda: total(server, "bireme_accepted_draft_tokens_total", worker="decode") > 20, 30, "drafts are accepted")


def test_sampled_streams_are_the_same_whether_there_is_room_for_drafts_or_not(server):
    """More sequences than max_concurrency have none."""
    fields = {"temperature": [0.6] * len(PROMPTS), "random_seed": list(range(len(PROMPTS)))}
    together = Run(server, PROMPTS, **fields).join()
    for at, prompt in enumerate(PROMPTS[:4]):
        own = {name: values[at : at + 1] for name, values in fields.items()}
        assert Run(server, [prompt], **own).join() == [together[at]]


def test_preempted_streams_of_several_priorities_say_the_same(server, expected):
    before = total(server, "bireme_preemptions_total", worker="decode")

    def was_preempted():
        return total(server, "bireme_preemptions_total", worker="decode") > before

    for _ in range(6):  # on a busy machine prompts may come one after the other
        run = Run(server, PROMPTS, priority=[at % 3 / 2 for at in range(len(PROMPTS))])
        assert run.join() == expected
        until(lambda: is_idle(server), 30, "nothing left behind")
        if was_preempted():
            break
    until(was_preempted, 30, "preemptions are told")


def test_what_was_drafted_comes_back_from_host_memory_right(server, expected):
    """An answer's blocks are found again once others have taken their place: they hold what was drawn, and no draft."""
    answered = [*PROMPTS[0], *expected[0]]
    alone = Run(server, [answered], 20).join()
    Run(server, PROMPTS[1:]).join()
    until(lambda: is_idle(server), 30, "the others have ended")
    before = total(server, "bireme_kv_onboarded_blocks_total", tier="host")
    again = Run(server, [answered], 20)
    assert again.join() == alone
    assert again.usages[0]["cached_tokens"] >= len(PROMPTS[0]) // BLOCK * BLOCK
    until(lambda: total(server, "bireme_kv_onboarded_blocks_total", tier="host") > before, 30, "blocks came back")


@pytest.mark.parametrize("worker", ["decode", "prefill"])
def test_streams_of_an_engine_that_is_killed_in_mid_burst_go_on_exactly(server, worker):
    """Streams are long enough that some are under way when the engine is killed; otherwise it is done again."""
    prompts = PROMPTS[:3]
    whole = Run(server, prompts, LONG).join()
    for _ in range(5):
        before = total(server, "bireme_migrations_total")
        run = Run(server, prompts, LONG)
        while not any(len(tokens) > 8 for tokens in run.tokens):
            time.sleep(0.001)
        pid = server.engine_pid(worker)
        os.kill(pid, signal.SIGKILL)
        assert run.join() == whole
        until(lambda pid=pid: is_up(server, worker, pid), 90, "the engine is up again")
        until(lambda: is_idle(server), 30, "nothing left behind")
        if worker == "prefill" or total(server, "bireme_migrations_total") > before:
            break
    else:
        pytest.fail("no stream was under way when its engine was killed")


def is_up(server, worker, killed):
    try:
        return server.engine_pid(worker) not in (None, killed) and total(server, "bireme_engine_up", worker=worker) == 1
    except Exception:  # between two lives
        return False
