"""Rows of whole answers: the model and its start, tokens and how they come, ends, errors, and what is told of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bireme.engines.trtllm.contract import contract
from bireme.errors import ConfigError
from bireme.messages import Finish, ProcessorCall, SamplingParams
from bireme.text.output import TextStream, TokenDelta
from bireme.text.tokenizer import TextTokenizer, load_tokenizer
from tests.contract.contract_drift import drift
from tests.contract.describe_api import USED, describe
from tests.gpu.trtllm_proof.bench import Bench, Done, Skipped, require

if TYPE_CHECKING:
    from tests.contract.trtllm_harness import Answer

# What bireme calls, beside the names of describe_api.USED.
_CALLED = ("generate_async", "get_stats_async", "get_kv_cache_events_async", "shutdown")
_GIVEN = ("inputs", "sampling_params", "streaming", "cache_salt", "lora_request", "kv_cache_retention_config")
_GIVEN += ("scheduling_params", "disaggregated_params")
_LONG = 1200  # tokens: seconds, for what is to be ended early


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


def start_with_drafts(bench: Bench) -> str:
    try:
        return start(bench)
    except ConfigError as error:
        if "NGram" not in str(error):
            raise
        raise Skipped(f"this release has no n-gram drafts: {error}") from error


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


def least_tokens(bench: Bench) -> str:
    known, at = bench.greedy, _stop_at(bench)
    done = bench.ask(known.prompt, end_id=known.tokens[at], min_tokens=10, max_tokens=12)
    require(len(done.tokens) >= 10, f"min_tokens 10: {len(done.tokens)} tokens came")
    return "an end is held back"


def _stop_at(bench: Bench) -> int:
    """Return where in the known answer a token stands for the first time, the third or a later one."""
    tokens = bench.greedy.tokens
    return next(at for at in range(2, len(tokens)) if tokens[at] not in tokens[:at])


def _check_stopped(done: Done, before: list[int], token: int) -> None:
    finish = done.finish
    require(finish.reason == "stop", f"it went on behind token {token}, and ended with {finish.reason}")
    require(finish.stop_token_id == token, f"it says that {finish.stop_token_id} ended it, and it was {token}")
    require(done.tokens == before, f"{done.tokens} came before the stop, and {before} without one")


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


def errors(bench: Bench) -> str:
    """A request at fault ends alone."""
    prompt = bench.prompt()
    finish = bench.begin(prompt, guided_decoding={"grammar": "root ::= ("}).wait(bench.limit_s)
    require(finish.error.startswith("INVALID_ARGUMENT"), f"a guide that is none ended with {finish.error or 'success'}")
    bench.check_greedy(bench.ask(prompt, ignore_eos=True))
    return "a guide that can't be compiled ends its request, and no other"


def drafts(bench: Bench) -> str:
    """Speculation must not change a token; an n-gram's drafts are right where an answer repeats its prompt."""
    for _ in range(4):
        bench.check_greedy(bench.ask(bench.prompt(16) * 3, max_tokens=16, ignore_eos=True))
    calls = (ProcessorCall("allowed_tokens", {"token_ids": [811]}),)
    return f"greedy tokens as without; processors are refused: {bench.refusal(logits_processors=calls)[:60]}"


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
