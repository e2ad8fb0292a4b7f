"""The rows: each asks for one feature and looks at what comes back.

A row raises Failed or Skipped, or says what it saw; any other exception is a failure, too.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bireme import disagg
from bireme.engines.trtllm.contract import contract
from bireme.engines.trtllm.kv_events import unsigned
from bireme.errors import ConfigError, NotFoundError, RequestError
from bireme.kv import hashing
from bireme.kv.events import BlocksStored
from bireme.messages import Finish, ProcessorCall, SamplingParams
from bireme.text.output import TextStream, TokenDelta
from bireme.text.tokenizer import TextTokenizer, load_tokenizer
from tests.contract.contract_drift import drift
from tests.contract.describe_api import USED, describe
from tests.contract.trtllm_harness import KEY
from tests.gpu.trtllm_proof.bench import NEAR_LOGPROB, NEARLY, Bench, Done, Failed, Skipped, require

if TYPE_CHECKING:
    from torch import Tensor

    from tests.contract.trtllm_harness import Answer

Row = Callable[[Bench], str]
# What bireme calls, beside the names of describe_api.USED.
_CALLED = ("generate_async", "get_stats_async", "get_kv_cache_events_async", "shutdown")
_GIVEN = ("inputs", "sampling_params", "streaming", "cache_salt", "lora_request", "kv_cache_retention_config")
_GIVEN += ("scheduling_params", "disaggregated_params")
_LONG = 1200  # tokens: seconds, for what is to be ended early
GUIDES = [
    ({"choice": ["a.b (c)", "[x]-{2}"]}, r"a\.b \(c\)|\[x\]-\{2\}"),
    ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
    ({"grammar": 'root ::= "<" [0-9] [0-9] ">"'}, "<[0-9]{2}>"),
    (
        {"json": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}},
        r'\s*\{\s*"n"\s*:\s*[12]\s*\}',
    ),
]


def model(bench: Bench) -> str:
    folder = bench.make_model()
    size = (folder / "model.safetensors").stat().st_size
    return f"{size / 1e6:.0f} MB, heads of 64, bfloat16"


def the_contract(bench: Bench) -> str:
    """What bireme calls must be there; all else that differs is told, and is no fault of anybody's."""
    described = describe()
    lines = drift(described, contract(), USED)
    modules = [module for module in USED if "auto_deploy" not in module]  # another backend, which nothing here starts
    needed = {f"{module}.{name}: missing" for module in modules for name in USED[module]}
    needed |= {f"LLM.{name}: missing" for name in _CALLED}
    needed |= {f"LLM.generate_async.{name}: missing" for name in _GIVEN}
    bench.warnings += [line for line in lines if line not in needed]
    missing = [line for line in lines if line in needed]
    require(not missing, "; ".join(missing))
    return f"{described['version']}, {len(bench.warnings)} differences that bireme does not depend on"


def start(bench: Bench) -> str:
    engine = bench.start()
    capacity = engine.capacity
    require(capacity.num_blocks > 0, "the engine does not tell the blocks of its KV pool")
    return f"TensorRT-LLM {bench.api.version}, {capacity.num_blocks} KV blocks, max_seq_len {capacity.max_seq_len}"


def generate(bench: Bench) -> str:
    for length in (1, 33, 100):
        done = bench.ask(bench.prompt(length), max_tokens=16, ignore_eos=True)
        require(done.finish.reason == "length", f"it ended with {done.finish.reason}")
        require(len(done.tokens) == 16, f"{len(done.tokens)} tokens, 16 were asked for")
        usage = done.finish.usage
        counted = (usage.prompt_tokens, usage.completion_tokens)
        require(counted == (length, 16), f"usage says {counted} of {length} and 16 tokens")
        bench.check_greedy(done)
    return "tokens are those of the reference"


def batch(bench: Bench) -> str:
    """Requests of different lengths at the same time: nobody gets another's tokens."""
    prompts = [bench.prompt(5 + 12 * at) for at in range(6)]
    answers = [bench.begin(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        bench.check_greedy(bench.end(prompt, answer))
    return "6 at a time"


def stream(bench: Bench) -> str:
    done = bench.ask(bench.prompt(), max_tokens=24, ignore_eos=True)
    pieces = [delta for delta in done.answer.deltas if delta.tokens]
    require(len(pieces) >= 8, f"24 tokens came in {len(pieces)} pieces")
    bench.check_greedy(done)
    return f"24 tokens in {len(pieces)} pieces"


def _stop_at(bench: Bench) -> int:
    """Return where in the known answer a token stands for the first time, the third or a later one."""
    tokens = bench.greedy.tokens
    return next(at for at in range(2, len(tokens)) if tokens[at] not in tokens[:at])


def _check_stopped(done: Done, before: list[int], token: int) -> None:
    finish = done.finish
    require(finish.reason == "stop", f"it went on behind token {token}, and ended with {finish.reason}")
    require(finish.stop_token_id == token, f"it says that {finish.stop_token_id} ended it, and it was {token}")
    require(done.tokens == before, f"{done.tokens} came before the stop, and {before} without one")


def stop_ids(bench: Bench) -> str:
    known, at = bench.greedy, _stop_at(bench)
    token = known.tokens[at]
    _check_stopped(bench.ask(known.prompt, stop_token_ids=(token, 7), max_tokens=16), known.tokens[:at], token)
    return f"ended by token {at}"


def end_id(bench: Bench) -> str:
    known, at = bench.greedy, _stop_at(bench)
    token = known.tokens[at]
    _check_stopped(bench.ask(known.prompt, end_id=token, max_tokens=16), known.tokens[:at], token)
    whole = bench.ask(known.prompt, end_id=token, ignore_eos=True, max_tokens=16)
    require(len(whole.tokens) == 16, f"with ignore_eos it ended after {len(whole.tokens)} of 16 tokens")
    return f"ended by token {at}, and not with ignore_eos"


def stop_strings(bench: Bench) -> str:
    """bireme's own text finds them; TensorRT-LLM must stream, and let itself be stopped."""
    tokenizer = load_tokenizer(str(bench.model))
    known = bench.greedy
    text = tokenizer.decode(known.tokens)
    parts = (text[at : at + 3] for at in range(len(text) // 3, len(text) - 3))
    stop = next(part for part in parts if part.isascii() and part.isprintable())
    follower = Follower(bench, tokenizer, known.prompt, stop)
    finish = follower.run()
    require(finish.reason == "cancelled", f"the string came, and the request ended with {finish.reason}")
    require(follower.text == text[: text.index(stop)], f"{follower.text!r} came before {stop!r}, of {text!r}")
    return _check_early(finish)


def _check_early(finish: Finish) -> str:
    """bireme says how it ended a request: whether TensorRT-LLM did, its tokens tell."""
    count = finish.usage.completion_tokens
    require(count < _LONG, f"it was ended early, and TensorRT-LLM went on to its last token, the {_LONG}th")
    return f"ended after {count} of {_LONG} tokens"


class Follower:
    """A request whose text is followed while it comes, as the decode stage does it."""

    def __init__(self, bench: Bench, tokenizer: TextTokenizer, prompt: list[int], stop: str) -> None:
        self._bench = bench
        self._texts: list[str] = []
        sampling = SamplingParams(stop=(stop,))
        self._stream = TextStream(tokenizer.detokenizer(), sampling, self._send, lambda finish: None, self._abort)
        self.answer: Answer = bench.begin(prompt, max_tokens=_LONG, ignore_eos=True)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def run(self) -> Finish:
        num_read = 0
        while self.answer.finish is None:
            tokens = self.answer.tokens[num_read:]
            num_read += len(tokens)
            if tokens:
                self._stream.push(tokens)
            time.sleep(0.001)
        return self.answer.finish

    def _send(self, delta: TokenDelta) -> None:
        self._texts.append(delta.text)

    def _abort(self) -> None:
        self._bench.engine.abort(self.answer)


def log_probabilities(bench: Bench) -> str:
    done = bench.ask(bench.prompt(), max_tokens=6, logprobs=3, ignore_eos=True)
    require(len(done.logprobs) == 6, f"{len(done.logprobs)} entries for 6 tokens")
    expected = bench.logits_of(done).log_softmax(-1)
    for token, entry, row in zip(done.tokens, done.logprobs, expected, strict=True):
        require(entry[0].token == token, f"an entry begins with {entry[0].token}, and the token is {token}")
        require(len(entry) == 4, f"{len(entry) - 1} alternatives, 3 were asked for")
        for item in entry:
            _check_logprob(item.token, item.logprob, row)
        least = float(row.topk(3).values[-1])
        require(all(row[item.token] > least - NEARLY for item in entry[1:]), "an alternative is not among the best")
    return "those of the reference, within 0.25"


def _check_logprob(token: int, logprob: float, row: Tensor) -> None:
    expected = float(row[token])
    require(
        abs(logprob - expected) < NEAR_LOGPROB,
        f"log probability of token {token}: {logprob:.2f}, by the reference {expected:.2f}",
    )


def prompt_log_probabilities(bench: Bench) -> str:
    done = bench.ask(bench.prompt(), max_tokens=1, prompt_logprobs=1)
    entries = done.answer.prompt_logprobs
    require(entries is not None, "none came")
    assert entries is not None
    count = len(done.prompt) - 1
    require(len(entries) == count, f"{len(entries)} entries, {count} prompt tokens have one")
    expected = bench.logits(done.prompt).log_softmax(-1)
    for entry, row in zip(entries, expected, strict=False):
        require(len(entry) > 1, "an entry without the likeliest token")
        _check_logprob(entry[1].token, entry[1].logprob, row)
        require(float(row.max() - row[entry[1].token]) < NEARLY, "an entry's token is not the likeliest")
    return f"{count} entries, those of the reference"


def sampling(bench: Bench) -> str:
    is_random = False
    for _ in range(2):
        done = bench.ask(bench.prompt(), max_tokens=12, temperature=2.0, top_k=5, ignore_eos=True)
        for token, row in zip(done.tokens, bench.logits_of(done), strict=True):
            best = row.topk(5).values
            require(float(row[token]) > float(best[-1]) - NEARLY, f"top_k 5: token {token} is not among the best 5")
            is_random |= float(row[token]) < float(best[0]) - NEARLY
    require(is_random, "24 tokens at temperature 2, each the likeliest")
    return "24 tokens among the best 5, not all of them the best"


def seeds(bench: Bench) -> str:
    if "seed" in bench.api.unheeded:
        return f"refused: {bench.refusal(temperature=1.0, seed=5)[:80]}"
    for _ in range(2):
        prompt = bench.prompt()
        answers = [bench.ask(prompt, temperature=2.0, seed=seed, ignore_eos=True).tokens for seed in (5, 5, 6)]
        require(answers[0] == answers[1], "one seed gave two answers")
        require(answers[0] != answers[2], "two seeds gave one answer")
    return "one seed gives one answer"


def penalties(bench: Bench) -> str:
    _check_repetition(bench)
    prompt, token, needed, at = _pushed(bench)
    push = {"logit_bias": {token: needed}, "max_tokens": 8, "ignore_eos": True}
    plain = bench.ask(prompt, **push).tokens
    require(plain == [token] * 8, f"a bias of {needed:.1f} on token {token} did not give it 8 times, but {plain}")
    for name in ("presence_penalty", "frequency_penalty"):
        tokens = bench.ask(prompt, **push, **{name: 2.0}).tokens
        require(tokens[: at + 1] != [token] * (at + 1), f"{name} 2.0 changed nothing")
    return "repetition, presence and frequency change the choice"


def _check_repetition(bench: Bench) -> None:
    """One below 1 draws tokens of the prompt: which one, is known."""
    penalty, prompt = 0.1, bench.prompt()
    row = bench.logits(prompt)[-1].clone()
    inside = sorted(set(prompt))
    values = row[inside]
    row[inside] = (values / penalty).where(values > 0, values * penalty)
    token = bench.ask(prompt, max_tokens=1, repetition_penalty=penalty).tokens[0]
    require(float(row.max() - row[token]) < NEARLY / penalty, f"repetition_penalty {penalty}: token {token} was chosen")


def _pushed(bench: Bench) -> tuple[list[int], int, float, int]:
    """Return a prompt, a token, the bias with which it comes 8 times, by 1 at the least, and where it is by 1."""
    draw = random.Random(1)
    prompt = bench.prompt()
    while True:
        token = draw.randrange(1000, 30_000)
        rows = bench.logits([*prompt, *[token] * 7])[len(prompt) - 1 :]
        missing = [float(row.max() - row[token]) for row in rows]
        at = missing.index(max(missing))
        if at:  # penalties begin with the second
            return prompt, token, max(missing) + 1.0, at


def bias(bench: Bench) -> str:
    tokens = bench.ask(bench.prompt(), logit_bias={777: 100.0}, max_tokens=3).tokens
    require(tokens == [777] * 3, f"a bias of 100 on token 777 gave {tokens}")
    return "a bias decides"


def bad_words(bench: Bench) -> str:
    first, second = bench.greedy.tokens[:2]
    done = bench.ask(bench.greedy.prompt, bad_token_ids=((first,),), max_tokens=12, ignore_eos=True)
    require(first not in done.tokens, f"token {first} came, and was forbidden")
    done = bench.ask(bench.greedy.prompt, bad_token_ids=((first, second),), max_tokens=12, ignore_eos=True)
    pairs = list(zip(done.tokens, done.tokens[1:], strict=False))
    require((first, second) not in pairs, f"tokens {first}, {second} came one after the other")
    return "one token and two in a row are kept out"


def least_tokens(bench: Bench) -> str:
    known, at = bench.greedy, _stop_at(bench)
    done = bench.ask(known.prompt, end_id=known.tokens[at], min_tokens=10, max_tokens=12)
    require(len(done.tokens) >= 10, f"min_tokens 10: {len(done.tokens)} tokens came")
    return "an end is held back"


def processors(bench: Bench) -> str:
    allowed = (ProcessorCall("allowed_tokens", {"token_ids": [811, 812]}),)
    tokens = bench.ask(bench.prompt(), logits_processors=allowed, max_tokens=6).tokens
    require(tokens and set(tokens) <= {811, 812}, f"allowed were 811 and 812, and {tokens} came")
    forced = (ProcessorCall("forced_sequence", {"token_ids": [811, 900, 813]}),)
    tokens = bench.ask(bench.prompt(), logits_processors=forced).tokens
    require(tokens == [811, 900, 813], f"forced were 811, 900, 813, and {tokens} came")
    return "one that does not look at the tokens, and one that does"


def guides(bench: Bench) -> str:
    tokenizer = load_tokenizer(str(bench.model))
    for guide, pattern in GUIDES:
        done = bench.ask(bench.prompt(), guided_decoding=guide, max_tokens=64)
        (kind,) = guide
        text = tokenizer.decode(done.tokens)
        require(re.fullmatch(pattern, text), f"{kind}: {text!r} is no match of {pattern}")
        require(done.finish.reason == "stop", f"{kind}: it ended with {done.finish.reason}")
    return "choice, regex, grammar, json"


def errors(bench: Bench) -> str:
    """A request at fault ends alone."""
    prompt = bench.prompt()
    finish = bench.begin(prompt, guided_decoding={"grammar": "root ::= ("}).wait(bench.limit_s)
    require(finish.error.startswith("INVALID_ARGUMENT"), f"a guide that is none ended with {finish.error or 'success'}")
    bench.check_greedy(bench.ask(prompt, ignore_eos=True))
    return "a guide that can't be compiled ends its request, and no other"


def cancel(bench: Bench) -> str:
    prompt = bench.prompt()
    answer = bench.begin(prompt, max_tokens=_LONG, ignore_eos=True)
    require(answer.has_tokens.wait(bench.limit_s), "no token came")
    bench.engine.abort(answer)
    finish = answer.wait(bench.limit_s)
    require(finish.reason == "cancelled", f"it was cancelled after its first token, and ended with {finish.reason}")
    seen = _check_early(finish)
    progress = bench.engine.engine.progress()
    require(not progress.num_running + progress.num_waiting, "the engine still counts it")
    bench.check_greedy(bench.ask(prompt, ignore_eos=True))
    return f"{seen}, and the engine goes on"


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


def statistics(bench: Bench) -> str:
    engine = bench.engine
    before = engine.engine.progress().step
    engine.metrics.take_delta()
    bench.ask(bench.prompt(), max_tokens=20, ignore_eos=True)
    told: set[str] = set()

    def are_told() -> bool:
        delta = engine.metrics.take_delta()
        told.update(name for name, *_ in (*delta.gauges, *delta.histograms))
        return {"bireme_engine_step_seconds", "bireme_kv_blocks_total"} <= told

    bench.wait_for(are_told, f"steps and KV blocks are not told: {', '.join(sorted(told)) or 'nothing is'}")
    steps = engine.engine.progress().step - before
    require(steps > 0, "no step is counted")
    return f"{steps} steps"


def times(bench: Bench) -> str:
    bench.engine.metrics.take_delta()
    bench.ask(bench.prompt(), max_tokens=4, ignore_eos=True)
    told = {name for name, *_ in bench.engine.metrics.take_delta().histograms}
    require("bireme_queue_seconds" in told, "return_perf_metrics is set, and the time in the queue is not told")
    return "the time in the queue is told"


def drafts(bench: Bench) -> str:
    """Speculation must not change a token; an n-gram's drafts are right where an answer repeats its prompt."""
    for _ in range(4):
        bench.check_greedy(bench.ask(bench.prompt(16) * 3, max_tokens=16, ignore_eos=True))
    calls = (ProcessorCall("allowed_tokens", {"token_ids": [811]}),)
    return f"greedy tokens as without; processors are refused: {bench.refusal(logits_processors=calls)[:60]}"


def _of_transfers(bench: Bench) -> dict[str, Any]:
    """Log probabilities go along where the release carries those of the first token."""
    is_carried = "first_gen_log_probs" in bench.api.disaggregated_fields
    return {"cache_salt": "", "ignore_eos": True, "max_tokens": 12} | ({"logprobs": 1} if is_carried else {})


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
            _check_logprob(token, entry[0].logprob, row.log_softmax(-1))
    try:
        bench.ask(exports[0]["prompt"], params, request_type="generation_only", cache_salt="")
    except (NotFoundError, RequestError):
        return f"{len(exports)} prompts, and none twice"
    raise Failed("KV that was fetched was fetched again")


def whole(bench: Bench) -> str:
    """A decode engine prefills for itself where it is asked to."""
    bench.check_greedy(bench.ask(bench.prompt(), ignore_eos=True))
    return "the decode engine alone answers alike"


def start_with_drafts(bench: Bench) -> str:
    try:
        return start(bench)
    except ConfigError as error:
        if "NGram" not in str(error):
            raise
        raise Skipped(f"this release has no n-gram drafts: {error}") from error


@dataclass(frozen=True)
class Life:
    """One engine process's rows, in order, after those that need no engine and its start."""

    stage: str
    yaml: dict[str, Any]
    rows: dict[str, Row]


_SIZES: dict[str, Any] = {"max_seq_len": 2048, "max_num_tokens": 2048}
_POOL: dict[str, Any] = {"max_tokens": 16_384, "free_gpu_memory_fraction": 0.3, "tokens_per_block": 32}
_APART = {
    **_SIZES,
    "kv_cache_config": _POOL,
    "cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": 2048, "kv_transfer_timeout_ms": 30_000},
}
_ONE = {
    **_SIZES,
    "kv_cache_config": _POOL | {"event_buffer_max_size": 4096},
    "guided_decoding_backend": "xgrammar",
    "return_perf_metrics": True,
}
_DRAFTS = {
    **_SIZES,
    "kv_cache_config": _POOL,
    "speculative_config": {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2},
}
LIVES = {
    "one": Life(
        "decode",
        _ONE,
        {
            "model": model,
            "contract": the_contract,
            "start": start,
            "generate": generate,
            "batch": batch,
            "stream": stream,
            "stop ids": stop_ids,
            "end id": end_id,
            "stop strings": stop_strings,
            "log probabilities": log_probabilities,
            "prompt log probabilities": prompt_log_probabilities,
            "sampling": sampling,
            "seeds": seeds,
            "penalties": penalties,
            "bias": bias,
            "bad words": bad_words,
            "least tokens": least_tokens,
            "processors": processors,
            "guides": guides,
            "cancel": cancel,
            "reuse": reuse,
            "salts": salts,
            "KV events": kv_events,
            "statistics": statistics,
            "times": times,
            "errors": errors,
        },
    ),
    "speculation": Life("decode", _DRAFTS, {"start": start_with_drafts, "drafts": drafts}),
    "prefill": Life("prefill", _APART, {"start": start, "export": export}),
    "decode": Life("decode", _APART, {"start": start, "whole": whole, "transfer": transfer}),
}
