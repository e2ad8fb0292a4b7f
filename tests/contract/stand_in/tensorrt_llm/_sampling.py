"""Choosing a token from a row of logits, and what is told about it."""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import torch

from tensorrt_llm import _contract
from tensorrt_llm._values import Logprob, is_greedy

# What the default sampler takes and does not heed: at 1.2.1. Late 1.3 heeds all of it.
IGNORED_BY_TORCH_SAMPLER = (
    frozenset()
    if _contract.FROM_1_3
    else frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty", "bad_token_ids", "seed"})
)


class Chooser:
    """One sequence's."""

    def __init__(
        self, params: Any, prompt: list[int], vocab_size: int, client_id: int, args: Any, guide: Guide | None = None
    ) -> None:
        self._params, self._client_id, self._guide = params, client_id, guide
        self._num_prompt = len(prompt)
        self._vocab_size = vocab_size
        self._ignored = frozenset() if args.sampler_type == "TRTLLMSampler" else IGNORED_BY_TORCH_SAMPLER
        # Its overlap scheduler begins a step before it has seen the token of the last one.
        self._lag = 0 if args.disable_overlap_scheduler else 1
        self._random = torch.Generator().manual_seed(self._heeded("seed") or int.from_bytes(os.urandom(7)))
        given = params.logits_processor or []
        self._processors = given if isinstance(given, list) else [given]

    def choose(self, logits: torch.Tensor, tokens: list[int]) -> tuple[int, dict[int, Logprob] | None]:
        """`logits` (vocab,), float32; tokens: prompt and generated."""
        plain = logits[: self._vocab_size].float().clone()
        known = tokens if len(tokens) == self._num_prompt else tokens[: len(tokens) - self._lag]
        self.process(plain, known)
        work = plain.clone()
        self._edit(work, tokens)
        if self._guide is not None:
            self._guide.mask(work)
        token = int(work.argmax()) if is_greedy(self._params) or self._params.temperature == 0 else self._draw(work)
        if self._guide is not None:
            self._guide.accept(token)
        return token, self.logprobs(plain, token, self._params.logprobs)

    def process(self, logits: torch.Tensor, tokens: list[int]) -> None:
        """Call the processors, which happens after each chunk of a prompt and not only after its last."""
        for processor in self._processors:
            processor(self._client_id, logits.view(1, 1, -1), [list(tokens)], None, None)

    def _heeded(self, name: str) -> Any:
        return None if name in self._ignored else getattr(self._params, name)

    def take_over(self, token: int) -> None:
        """A context engine chose this one; the guide goes on behind it."""
        if self._guide is not None:
            self._guide.accept(token)

    def logprobs(self, logits: torch.Tensor, token: int, count: int | None) -> dict[int, Logprob] | None:
        """The k likeliest and the chosen one, each with its rank; as in the real one, 0 is none."""
        if not count:
            return None
        values = torch.log_softmax(logits, -1)
        top = values.topk(count)
        found = {int(i): Logprob(float(v), rank + 1) for rank, (v, i) in enumerate(zip(*top, strict=True))}
        if token not in found:
            found[token] = Logprob(float(values[token]), int((values > values[token]).sum()) + 1)
        return found

    def _edit(self, work: torch.Tensor, tokens: list[int]) -> None:
        params, output = self._params, tokens[self._num_prompt :]
        if params.embedding_bias is not None:
            work += params.embedding_bias
        if penalty := self._heeded("repetition_penalty"):
            seen = torch.tensor(sorted(token for token in set(tokens) if token < self._vocab_size))
            values = work[seen]
            work[seen] = torch.where(values > 0, values / penalty, values * penalty)
        presence, frequency = self._heeded("presence_penalty") or 0, self._heeded("frequency_penalty") or 0
        for token in set(output):
            work[token] -= presence + frequency * output.count(token)
        for token in self._heeded("bad_token_ids") or ():
            work[token] = float("-inf")
        end_id = -1 if params.ignore_eos else params.end_id
        if len(output) < (params.min_tokens or 0) and end_id is not None and (end_id >= 0 or not _contract.FROM_1_3):
            work[end_id] = float("-inf")  # at 1.2.1 an end id of -1 bans the vocabulary's last

    def _draw(self, work: torch.Tensor) -> int:
        params = self._params
        work = work / (params.temperature or 1.0)
        if params.top_k:
            work[work < work.topk(min(params.top_k, len(work))).values[-1]] = float("-inf")
        if params.top_p is not None and params.top_p < 1:
            ordered, order = work.softmax(-1).sort(descending=True)
            work[order[ordered.cumsum(-1) - ordered >= params.top_p]] = float("-inf")
        if params.min_p:
            probabilities = work.softmax(-1)
            work[probabilities < params.min_p * probabilities.max()] = float("-inf")
        return int(torch.multinomial(work.softmax(-1), 1, generator=self._random))


class Guide:
    """A request's grammar, by xgrammar as in the real engine."""

    def __init__(self, compiler: Any, params: Any, vocab_size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(_compile(compiler, params))
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def mask(self, logits: torch.Tensor) -> None:
        import xgrammar

        self._matcher.fill_next_token_bitmask(self._bitmask)
        xgrammar.apply_token_bitmask_inplace(logits, self._bitmask)

    def accept(self, token: int) -> None:
        self._matcher.accept_token(token)


def make_compiler(folder: str, vocab_size: int) -> Any:
    import xgrammar

    return xgrammar.GrammarCompiler(_vocabulary(folder, vocab_size))


@functools.cache
def _vocabulary(folder: str, vocab_size: int) -> Any:
    """Made once: it takes as long as half an engine's start."""
    import xgrammar

    from tensorrt_llm._model import load_tokenizer

    return xgrammar.TokenizerInfo.from_huggingface(load_tokenizer(folder), vocab_size=vocab_size)


def _compile(compiler: Any, params: Any) -> Any:
    if params.json is not None:
        schema = params.json if isinstance(params.json, str) else json.dumps(params.json)
        return compiler.compile_json_schema(schema)
    if params.json_object:
        return compiler.compile_builtin_json_grammar()
    if params.regex is not None:
        return compiler.compile_regex(params.regex)
    if params.grammar is not None:
        return compiler.compile_grammar(params.grammar)
    return compiler.compile_structural_tag(params.structural_tag)
