"""Mixed requests in one crowded engine against each of them asked alone: the same tokens, whatever runs beside.

The crowded engine has all that is on by default (graphs, steps started ahead, reuse) and a KV pool that is too small:
requests are preempted. They come at random, many begin alike, one in seven is aborted. Among them are greedy and
sampled ones, penalties, bias, bans, log probabilities and guides. Each is then asked alone of a second engine that has
no graphs, no step ahead and no reuse. tiny-chat in float32, so that sums in another order choose no other token.

    python tests/gpu/mixed_stress.py                        # 900 requests on a GPU, without one on the CPU
    python tests/gpu/mixed_stress.py --drafts 4             # with n-gram drafts of up to four tokens
    python tests/gpu/mixed_stress.py --requests 60 --seed 7

The counts come first, then one line of JSON, then the aims; the exit status is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a program: it runs from any folder

from tokenizers import Tokenizer

from bireme.config import GuidedDecodingConfig, SpeculativeConfig
from bireme.messages import EngineRequest
from tests.engines.torch.torch_harness import Harness, Result, request

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-chat"
MOST_PROMPT, MOST_ANSWER, MOST_AT_ONCE = 400, 90, 80
POOL_TOKENS, BLOCK = 1600, 16
ABORTED = 1 / 7
LOGPROB_TOLERANCE = 2e-3
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 999}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "bias": {"logit_bias": {30: 4.0, 31: -100.0}, "bad_token_ids": ((40,), (41, 42))},
    "stops": {"stop_token_ids": tuple(range(50, 80)), "min_tokens": 3, "ignore_eos": False},
    "regex": {"guided_decoding": {"regex": "[a-z]{4,30}( [a-z]{2,9}){0,6}"}, "ignore_eos": False, "temperature": 1.0},
    "json": {"guided_decoding": {"json": SCHEMA}, "ignore_eos": False},
    "json_object": {"guided_decoding": {"json_object": True}, "ignore_eos": False, "temperature": 0.8},
}


@dataclass
class Asked:
    kind: str
    what: EngineRequest
    result: Result
    is_aborted: bool = False


def main() -> int:
    options = parse()
    draws = random.Random(options.seed)
    began = time.monotonic()
    asked, crowd = crowded(make_requests(options.requests, draws), options, draws)
    crowded_s = time.monotonic() - began
    print(f"{len(asked)} requests beside each other: {crowded_s:.0f} s; each alone:", flush=True)
    verdicts = alone(asked)
    missing = [one for one in asked if not one.is_aborted and one.result.finish.error]
    figures = {
        "requests": len(asked), "kinds": Counter(one.kind for one in asked), "crowded_s": round(crowded_s, 1),
        "seconds": round(time.monotonic() - began, 1), "verdicts": Counter(verdicts.values()), **crowd,
    }  # fmt: skip
    for number, verdict in verdicts.items():
        if verdict != "equal":
            print(f"{number}: {asked[number].kind}, {verdict}: {asked[number].what.sampling}")
    print(json.dumps({"benchmark": "mixed_stress", "options": vars(options), **figures}))
    aims = {
        f"{figures['verdicts']['equal']} of {len(asked)} requests answered as alone, all asked for": len(missing) == 0
        and figures["verdicts"]["equal"] == len(asked),
        f"{crowd['preemptions']} preemptions, one or more asked for": crowd["preemptions"] > 0,
        f"{crowd['blocks_left']} blocks left, none allowed": crowd["blocks_left"] == 0,
    }
    if options.drafts:
        aims[f"{crowd['accepted']} of {crowd['drafted']} drafted tokens accepted, some asked for"] = (
            crowd["accepted"] > 0
        )
    for text, is_met in aims.items():
        print(f"aim: {text}: {'ok' if is_met else 'BELOW'}")
    return 0 if all(aims.values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=900)
    parser.add_argument("--drafts", type=int, default=0, help="max_draft_len; default: no drafts")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def make_requests(count: int, draws: random.Random) -> list[tuple[str, EngineRequest]]:
    """Return kinds and requests; a third of the prompts begin as others do, a third of all repeat themselves."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    special = tokenizer.get_added_tokens_decoder()
    ids = sorted(set(tokenizer.get_vocab().values()) - special.keys())
    beginnings = [draws.choices(ids, k=MOST_PROMPT // 2) for _ in range(12)]
    found = []
    for _ in range(count):
        prompt = draws.choices(ids, k=int(MOST_PROMPT ** draws.uniform(0.3, 1)))
        if draws.random() < 1 / 3:
            prompt[: MOST_PROMPT // 2] = draws.choice(beginnings)[: len(prompt)]
        if draws.random() < 1 / 3:
            prompt = (prompt[: len(prompt) // 4 + 1] * 4)[: len(prompt)]
        kind = draws.choice(list(KINDS))
        fields = {"seed": draws.getrandbits(40)} | KINDS[kind]
        found.append((kind, request(prompt, int(MOST_ANSWER ** draws.uniform(0.4, 1)), **fields)))
    return found


def crowded(
    requests: list[tuple[str, EngineRequest]], options: argparse.Namespace, draws: random.Random
) -> tuple[list[Asked], dict[str, Any]]:
    """Return what was answered with all beside each other, and what the engine counted."""
    settings: dict[str, Any] = {}
    if options.drafts:
        settings["speculative_config"] = SpeculativeConfig(decoding_type="NGram", max_draft_len=options.drafts)
    asked: list[Asked] = []
    timers: list[threading.Timer] = []
    with start(max_batch_size=48, queue={"capacity_scheduler_policy": "MAX_UTILIZATION"}, **settings) as engine:
        for kind, what in requests:
            while sum(not one.result.is_over.is_set() for one in asked[-2 * MOST_AT_ONCE :]) >= MOST_AT_ONCE:
                time.sleep(0.002)
            one = Asked(kind, what, engine.submit(what), draws.random() < ABORTED)
            asked.append(one)
            if one.is_aborted:
                timers.append(threading.Timer(draws.random() * 0.3, engine.abort, [one.result]))
                timers[-1].start()
            if draws.random() < 0.1:
                time.sleep(draws.random() * 0.05)
        for timer in timers:
            timer.join()
        for one in asked:
            assert one.result.finish is not None
        engine.settle()
        counters = Counter[str]()
        for name, _, value in engine.metrics.take_delta().counters:
            counters[name] += int(value)
        counted = {
            "preemptions": counters["bireme_preemptions_total"],
            "drafted": counters["bireme_draft_tokens_total"],
            "accepted": counters["bireme_accepted_draft_tokens_total"],
            "blocks_left": int(engine.manager.num_referenced),
        }
    return asked, counted


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    reason: str

    @classmethod
    def of(cls, result: Result) -> Answer:
        reason = result.finish.reason  # waits for the rest
        return cls(result.tokens, result.logprobs, list(result.prompt_logprobs or ()), reason)


def alone(asked: list[Asked]) -> dict[int, str]:
    """Return a verdict for each: equal, or how its tokens or log probabilities are not those of the request alone."""
    num_processes = max(1, min(8, (os.cpu_count() or 1) // 2, len(asked) // 50))
    parts = [[one.what for one in asked[at::num_processes]] for at in range(num_processes)]
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        answers = list(pool.map(ask_alone, parts))
    return {
        number: verdict_of(one, answers[number % num_processes][number // num_processes])
        for number, one in enumerate(asked)
    }


def ask_alone(requests: list[EngineRequest]) -> list[Answer]:
    plain: dict[str, Any] = {"cuda_graph_config": None, "disable_overlap_scheduler": True, "enable_block_reuse": False}
    with start(max_batch_size=1, **plain) as engine:
        return [Answer.of(engine.submit(one)) for one in requests]


def verdict_of(one: Asked, expected: Answer) -> str:
    found = Answer.of(one.result)
    if one.is_aborted and found.reason not in ("length", "stop"):
        return "equal" if found.tokens == expected.tokens[: len(found.tokens)] else "other tokens before its abort"
    if found.tokens != expected.tokens:
        pairs = enumerate(zip(found.tokens, expected.tokens, strict=False))
        at = next((at for at, (own, other) in pairs if own != other), -1)
        return f"other tokens from {at} of {len(found.tokens)} and {len(expected.tokens)} on"
    for own, other in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
        if any(abs(a[0].logprob - b[0].logprob) > LOGPROB_TOLERANCE for a, b in zip(own, other, strict=True)):
            return "other log probabilities"
    return "equal" if found.reason == expected.reason else "ended for another reason"


def start(**settings: Any) -> Harness:
    guides = GuidedDecodingConfig(compile_timeout_s=60, num_processes=1)
    return Harness(
        str(MODEL), dtype="float32", max_tokens=POOL_TOKENS, tokens_per_block=BLOCK, max_seq_len=512,
        guided_decoding_config=guides, **settings,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
