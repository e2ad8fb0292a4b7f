"""Choosing a token from a row of logits, and what is told about it."""

from __future__ import annotations

import json
import pickle
from typing import Any

import torch

from tensorrt_llm._values import Logprob, is_greedy


class Chooser:
    """One sequence's."""

    def __init__(
        self, params: Any, prompt: list[int], vocab_size: int, client_id: int, guide: Guide | None = None
    ) -> None:
        self._params, self._client_id, self._guide = params, client_id, guide
        self._num_prompt = len(prompt)
        self._vocab_size = vocab_size
        self._random = torch.Generator().manual_seed((params.seed or 0) % 2**63)
        given = params.logits_processor or []
        given = given if isinstance(given, list) else [given]
        self._processors = [pickle.loads(pickle.dumps(one)) for one in given]  # they go to another process

    def choose(self, logits: torch.Tensor, tokens: list[int]) -> tuple[int, dict[int, Logprob] | None]:
        """`logits` (vocab,), float32; tokens: prompt and generated."""
        plain = logits[: self._vocab_size].float()
        work = plain.clone()
        self._edit(work, tokens)
        for processor in self._processors:
            processor(self._client_id, work.view(1, 1, -1), [list(tokens)], None, self._client_id)
        if self._guide is not None:
            self._guide.mask(work)
        token = int(work.argmax()) if is_greedy(self._params) or self._params.temperature == 0 else self._draw(work)
        if self._guide is not None:
            self._guide.accept(token)
        return token, self.logprobs(plain, token, self._params.logprobs)

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
        if params.repetition_penalty:
            seen = torch.tensor(sorted(set(tokens)))
            values = work[seen]
            work[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        for token in set(output):
            work[token] -= (params.presence_penalty or 0) + (params.frequency_penalty or 0) * output.count(token)
        for token in params.bad_token_ids or ():
            work[token] = float("-inf")
        if len(output) < (params.min_tokens or 0) and params.end_id is not None and params.end_id >= 0:
            work[params.end_id] = float("-inf")

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
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size))


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
