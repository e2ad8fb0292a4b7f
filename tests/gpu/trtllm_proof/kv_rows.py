"""Rows of KV: found again, kept apart by salts, told of in events, and moved from prefill to decode."""

from __future__ import annotations

import json
from typing import Any

from bireme import disagg
from bireme.engines.trtllm.kv_events import unsigned
from bireme.errors import NotFoundError, RequestError
from bireme.kv.blocks import hashing
from bireme.kv.blocks.events import BlocksStored
from tests.contract.trtllm_harness import KEY
from tests.gpu.trtllm_proof.bench import Bench, Failed, check_logprob, require


def reuse(bench: Bench) -> str:
    prompt = bench.prompt(100)
    first = bench.ask(prompt, cache_salt="reuse", max_tokens=4, ignore_eos=True)
    require(not first.num_cached, f"{first.num_cached} tokens of a new prompt are said to be cached")
    return f"{_found_again(bench, prompt, 'reuse')} of 100 tokens were found again"


def _found_again(bench: Bench, prompt: list[int], salt: str) -> int:
    """Ask until blocks are found, which can be some iterations after their request has ended; return the tokens."""
    found: list[int] = []

    def are_found() -> bool:
        done = bench.ask(prompt, cache_salt=salt, max_tokens=4, ignore_eos=True)
        bench.check_greedy(done)
        found.append(done.num_cached)
        return done.num_cached >= 64

    bench.wait_for(are_found, "of 100 tokens that were asked before, too few were found")
    return found[-1]


def salts(bench: Bench) -> str:
    """Another salt is asked for what can be found by then: else nothing would be shown."""
    prompt = bench.prompt(100)
    bench.ask(prompt, cache_salt="one", max_tokens=4, ignore_eos=True)
    _found_again(bench, prompt, "one")
    done = bench.ask(prompt, cache_salt="another", max_tokens=2)
    require(not done.num_cached, f"{done.num_cached} tokens of another salt's request were found")
    return "another salt finds nothing"


def kv_events(bench: Bench) -> str:
    bench.engine.engine.kv_events()
    prompt = bench.prompt(100)
    bench.ask(prompt, cache_salt="", max_tokens=2)
    wanted = hashing.sequence_hashes(prompt, bench.engine.capacity.tokens_per_block)
    seen: list[int] = []

    def are_there() -> bool:
        for event in bench.engine.engine.kv_events():
            if isinstance(event, BlocksStored):
                seen.extend(block.block_hash for block in event.blocks)
        return {*map(unsigned, wanted)} <= {*map(unsigned, seen)}

    bench.wait_for(are_there, f"{len(wanted)} blocks were stored, and {len(seen)} others told of")
    return f"{len(wanted)} blocks by their public hashes"


def export(bench: Bench) -> str:
    """Prefill three prompts, and leave for the decode engine what it needs."""
    exports = []
    for length in (33, 70, 100):
        prompt = bench.prompt(length)
        done = bench.ask(prompt, request_type="context_only", **_of_transfers(bench))
        require(done.finish.reason == "not_finished", f"a prefill ended with {done.finish.reason}")
        require(done.answer.exported is not None, "a prefill exported nothing")
        assert done.answer.exported is not None
        exports.append({"prompt": prompt, "params": disagg.seal(done.answer.exported, KEY).decode()})
    (bench.folder / "exports.json").write_text(json.dumps(exports))
    return f"{len(exports)} prompts"


def transfer(bench: Bench) -> str:
    """Take the KV of the prompts that the prefill engine has exported: tokens must be those of the whole prompt."""
    exports = json.loads((bench.folder / "exports.json").read_text())
    for one in exports:
        params = disagg.unseal(one["params"].encode(), KEY)
        done = bench.ask(one["prompt"], params, request_type="generation_only", **_of_transfers(bench))
        require(len(done.tokens) == 12, f"{len(done.tokens)} tokens, 12 were asked for")
        require(done.tokens[0] == params.first_gen_tokens[0], "the first token is not that of the prefill")
        bench.check_greedy(done)
        for token, entry, row in zip(done.tokens, done.logprobs, bench.logits_of(done), strict=False):
            check_logprob(token, entry[0].logprob, row.log_softmax(-1))
    try:
        bench.ask(exports[0]["prompt"], params, request_type="generation_only", cache_salt="")
    except (NotFoundError, RequestError):
        return f"{len(exports)} prompts, and none twice"
    raise Failed("KV that was fetched was fetched again")


def _of_transfers(bench: Bench) -> dict[str, Any]:
    """Log probabilities go along where the release carries those of the first token."""
    is_carried = "first_gen_log_probs" in bench.api.disaggregated_fields
    return {"cache_salt": "", "ignore_eos": True, "max_tokens": 12} | ({"logprobs": 1} if is_carried else {})


def whole(bench: Bench) -> str:
    """A decode engine prefills for itself where it is asked to."""
    bench.check_greedy(bench.ask(bench.prompt(), ignore_eos=True))
    return "the decode engine alone answers alike"
