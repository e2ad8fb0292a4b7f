"""Responses of the text pipelines, in the two contracts that clients know.

tensorrtllm_backend's: a TokenDelta's tensors, and the extras that were requested. vllm_backend's: text_output and what
was requested, finish_reason "None" until the end. Streaming sends parts of one sequence each; otherwise one response
has everything, with one element a sequence where n > 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from bireme.messages import TokenLogprob, TokenLogprobs, Usage
from bireme.request import DRAFT_COUNTS, Contract
from bireme.text.output import TokenDelta
from bireme.types import Array, Response, Send, Tensors

_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    contract: Contract
    extras: frozenset[str]
    num_input_tokens: int
    token_text: Callable[[int], str]  # for vllm's logprobs
    prompt: str = ""  # echoed before a whole answer
    outputs: frozenset[str] | None = None  # all that a response may hold; None: everything
    hides_logprobs: bool = False  # they are there for their sum alone

    @property
    def is_plain(self) -> bool:
        """Whether a TokenDelta's own tensors are the whole answer."""
        return self.contract == "trtllm" and not self.extras

    def chosen(self, outputs: Tensors) -> Tensors:
        if self.outputs is None:
            return outputs
        return {name: array for name, array in outputs.items() if name in self.outputs}


class RunningSums:
    __slots__ = ("logprob", "num_tokens")

    def __init__(self) -> None:
        self.logprob = 0.0
        self.num_tokens = 0

    def count(self, delta: TokenDelta) -> None:
        self.num_tokens += len(delta.tokens)
        if delta.logprobs:
            self.logprob += sum(entry[0][1] for entry in delta.logprobs)


class DeltaResponse:
    """A delta with the additions of its form; later parts of the same sequence merge into it."""

    __slots__ = ("_delta", "_form", "_logprob", "_num_tokens")

    def __init__(self, delta: TokenDelta, form: AnswerFormat, tally: RunningSums) -> None:
        self._delta, self._form = delta, form
        self._logprob, self._num_tokens = tally.logprob, tally.num_tokens

    def merge(self, later: Response) -> Response | None:
        if not isinstance(later, DeltaResponse) or self._delta.merge(later._delta) is None:
            return None
        self._logprob, self._num_tokens = later._logprob, later._num_tokens
        return self

    def tensors(self) -> Tensors:
        delta, form = self._delta, self._form
        outputs = dict(delta.tensors())
        if form.contract == "vllm" and not delta.finish_reason:
            outputs["finish_reason"] = _strings(["None"])
        num_tokens = len(delta.tokens) if form.contract == "vllm" else self._num_tokens
        return form.chosen(outputs | _extras(form, [delta], [num_tokens], [self._logprob]))


class StreamedDeltas:
    __slots__ = ("_form", "_send", "_tally")

    def __init__(self, send: Send, form: AnswerFormat) -> None:
        self._send, self._form, self._tally = send, form, RunningSums()

    def add(self, delta: TokenDelta) -> None:
        self._tally.count(delta)
        self._send(DeltaResponse(delta, self._form, self._tally))


class CollectedDeltas:
    """Keeps a sequence's deltas as one, and the newest, which may still grow."""

    __slots__ = ("_first", "_newest")

    def __init__(self) -> None:
        self._first: TokenDelta | None = None
        self._newest: TokenDelta | None = None

    def add(self, delta: TokenDelta) -> None:
        if self._first is None:
            self._first = delta
            return
        if self._newest is not None:
            self._first.merge(self._newest)
        self._newest = delta

    def joined(self) -> TokenDelta:
        """Return all of them as one, after the last."""
        assert self._first is not None, "a sequence that has ended well has sent its end"
        if self._newest is not None:
            self._first.merge(self._newest)
            self._newest = None
        return self._first


class WholeResponse:
    is_last = True

    def __init__(self, deltas: list[TokenDelta], form: AnswerFormat) -> None:
        self._deltas, self._form = deltas, form

    def merge(self, later: Response) -> Response | None:
        return None

    def tensors(self) -> Tensors:
        deltas, form = self._deltas, self._form
        outputs = dict(deltas[0].tensors()) if len(deltas) == 1 else _joined([delta.tensors() for delta in deltas])
        if form.prompt:
            outputs["text_output"] = _strings([form.prompt + delta.text for delta in deltas])
        if form.is_plain:
            return outputs
        sums = [sum(entry[0][1] for entry in delta.logprobs or ()) for delta in deltas]
        return form.chosen(outputs | _extras(form, deltas, [len(delta.tokens) for delta in deltas], sums))


def _joined(parts: list[Tensors]) -> dict[str, Array]:
    """Concatenate per name; a sequence without a value has an empty string where there is one a sequence."""
    names = {name: array.dtype for part in parts for name, array in part.items()}
    blank = _strings([""])
    return {
        name: np.concatenate([part.get(name, blank if dtype == np.object_ else np.zeros(0, dtype)) for part in parts])
        for name, dtype in names.items()
    }


def _extras(form: AnswerFormat, deltas: list[TokenDelta], counts: list[int], sums: list[float]) -> dict[str, Array]:
    if not form.extras:
        return {}
    makers: Mapping[str, Callable[[], Array]] = {
        "output_log_probs": lambda: _log_probs(deltas),
        "cum_log_probs": lambda: np.array(sums, np.float32),
        "cumulative_logprob": lambda: np.array(sums, np.float32),
        "logprobs": lambda: _strings([_shown_logprobs(delta, form) for delta in deltas]),
        "num_input_tokens": lambda: np.array([form.num_input_tokens], np.uint32),
        "num_output_tokens": lambda: np.array(counts, np.uint32),
        "sequence_index": lambda: np.array([delta.index or 0 for delta in deltas], np.int32),
    }
    usages = [delta.usage for delta in deltas if delta.usage is not None]
    drafts = draft_counts(usages) if usages else {}
    wanted = {name: array for name, array in drafts.items() if name in form.extras}
    return {name: makers[name]() for name in form.extras.difference(DRAFT_COUNTS)} | wanted


def draft_counts(usages: Sequence[Usage]) -> dict[str, Array]:
    """Return what became of the drafts of ended sequences, one element each; a rate is 0 where nothing was drafted."""
    rates = [usage.num_accepted / max(1, usage.drafted_tokens) for usage in usages]
    return {
        "acceptance_rate": np.array(rates, np.float32),
        "total_accepted_draft_tokens": np.array([usage.num_accepted for usage in usages], np.int32),
        "total_draft_tokens": np.array([usage.drafted_tokens for usage in usages], np.int32),
    }


def _log_probs(deltas: list[TokenDelta]) -> Array:
    return np.array([entry[0][1] for delta in deltas for entry in delta.logprobs or ()], np.float32)


def _shown_logprobs(delta: TokenDelta, form: AnswerFormat) -> str:
    return "null" if form.hides_logprobs else vllm_logprobs(delta, form.token_text)


def vllm_logprobs(delta: TokenDelta, token_text: Callable[[int], str]) -> str:
    """vllm_backend's form: a JSON list, one object a token: id -> logprob, rank, decoded_token."""
    if delta.logprobs is None:
        return "null"
    return _json([_ranked(entry, token_text) for entry in delta.logprobs]).decode()


def _ranked(entry: TokenLogprobs, token_text: Callable[[int], str]) -> dict[str, Any]:
    """The chosen token comes first; an engine without ranks gets those of the places."""
    likeliest = {item[0]: place for place, item in enumerate(entry[1:], 1)}

    def describe(item: TokenLogprob) -> dict[str, Any]:
        rank = item.rank or likeliest.get(item.token)
        return {"logprob": item.logprob, "rank": rank, "decoded_token": token_text(item.token)}

    return {str(item.token): describe(item) for item in entry}


def _strings(values: list[str]) -> Array:
    return np.array([value.encode() for value in values], np.object_)
