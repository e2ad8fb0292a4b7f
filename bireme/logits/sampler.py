"""Chooses the next token of every row of a step.

In order: logit bias; repetition, frequency and presence penalty; bad words and, until min_tokens, stop ids masked; the
request's own processors; its guide's mask; temperature; top-k; top-p; min-p; draw. A complete guide ends the answer,
even before min_tokens. Log probabilities are the model's own, before all of that (OpenAI's API, vLLM's default).

Repetition counts prompt and output, presence and frequency output alone (vLLM, TensorRT-LLM). Bad words are matched
over both (transformers). A row's result never depends on the batch, and its failure ends no other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from bireme.errors import BiremeError, RequestError
from bireme.logits import filters
from bireme.logits.base import BaseLogitsProcessor, ProcessorContext, call
from bireme.logits.guided.filling import MaskFiller
from bireme.logits.guided.guidance import Guidance, num_words
from bireme.logits.guided.mask import apply
from bireme.logits.logprobs import token_logprobs
from bireme.logits.random import draw_key
from bireme.logits.registry import create
from bireme.logits.rows import Row
from bireme.logits.sending import outgoing, send
from bireme.messages import SamplingParams, TokenLogprobs
from bireme.own_work import NO_MARK

if TYPE_CHECKING:
    import torch

Key = TypeVar("Key", bound=Hashable)
DrawRows = Callable[["torch.Tensor", Sequence[Row]], list[int]]  # float32 (rows, vocab), finite maxima
NO_TOKEN = -1  # in place of the token of a failed row
NOTHING_LEFT = -2  # of a row whose own edits leave no token a finite score


@dataclass(slots=True)
class Sampled:
    """One entry a row."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, BiremeError] = field(default_factory=dict)  # row -> why it has no token


class Sampler(Generic[Key]):
    """All sequences of an engine, by the engine's own keys, on its thread."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        max_processor_s: float = math.inf,
        draw: DrawRows | None = None,
        mark: Callable[[Key], AbstractContextManager[None]] = lambda key: NO_MARK,
        num_threads: int = 1,
    ) -> None:
        """`max_processor_s`: CPU time of a row's own processors for one token. `mark`: held while they work.

        `draw`: of rows on the device, as `filters.draw_row`; None: they are copied to the CPU.
        """
        self._mark = mark
        self._filler = MaskFiller(num_threads)
        self.vocab_size = vocab_size
        self._max_processor_s = max_processor_s
        self._device = device
        self._is_cpu = str(device).startswith("cpu")
        self._draw_there = draw
        self._rows: dict[Key, Row] = {}
        self.late: dict[Key, Row] = {}  # of these, those that may not be simple

    def check(self, params: SamplingParams, eos_ids: Sequence[int] = ()) -> None:
        """Raise RequestError for what only this process's plug-ins can tell."""
        self._processors(params, "check", 0, eos_ids)

    def add(
        self,
        key: Key,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        eos_ids: Sequence[int] = (),
        guidance: Guidance | None = None,
    ) -> None:
        """Start a sequence, or restart it after a preemption. Raises RequestError as `check` does.

        Ids in `params` are of the vocabulary. `guidance` has taken `output_ids`, and is the sampler's now.
        """
        mark, processors = NO_MARK, list[BaseLogitsProcessor]()
        if params.logits_processors:
            with (mark := self._mark(key)):
                processors = self._processors(params, str(key), len(prompt_ids), eos_ids)
        row = Row(params, prompt_ids, output_ids, eos_ids, self.vocab_size, processors, guidance, mark)
        self._rows[key] = row
        if guidance is not None or not row.is_simple:
            self.late[key] = row

    def remove(self, key: Key) -> None:
        self._rows.pop(key, None)
        self.late.pop(key, None)

    def row(self, key: Key) -> Row:
        return self._rows[key]

    def accept(self, key: Key, token: int) -> None:
        """Add a token that was chosen elsewhere. Raises BiremeError for none, or one that a guide denies."""
        row = self._rows[key]
        if token in (NO_TOKEN, NOTHING_LEFT):
            raise _why_unusable(row, is_own=token == NOTHING_LEFT)
        row.append(token)

    def accept_simple(self, key: Key, count: int) -> None:
        """Add tokens to a sequence that is not in `late`."""
        self._rows[key].num_output += count

    def edit(self, logits: torch.Tensor, keys: Sequence[Key]) -> dict[int, BiremeError]:
        """Change float32 logits (rows, vocab) as the sequences ask; return why a row has no token.

        Waits for no GPU, unless their own processors do.
        """
        return self._change(logits, [self._rows[key] for key in keys])

    def sample(self, logits: torch.Tensor, keys: Sequence[Key]) -> Sampled:
        """Choose one token a row of `logits` (rows, vocab), any float dtype, unchanged."""
        return self.sample_rows(logits, [self._rows[key] for key in keys])

    def sample_rows(self, logits: torch.Tensor, rows: list[Row]) -> Sampled:
        if logits.size(1) > self.vocab_size:  # heads may be padded
            logits = logits[:, : self.vocab_size]
        tokens = [NO_TOKEN] * len(rows)
        errors: dict[int, BiremeError] = {}
        plain = [at for at, row in enumerate(rows) if row.is_plain]
        if plain:
            self._argmax(_pick(logits, plain), plain, tokens)
        if len(plain) < len(rows):
            worked = [at for at, row in enumerate(rows) if not row.is_plain]
            self._process(logits[worked].float(), [rows[at] for at in worked], worked, tokens, errors)
        _append(logits, rows, tokens, errors)
        return Sampled(tokens, _logprobs(logits, rows, tokens), errors)

    def prompt_logprobs(self, logits: torch.Tensor, next_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Return, for each row, the log probability of the token that followed, and the k likeliest."""
        return token_logprobs(logits[:, : self.vocab_size], next_ids, k)

    def _processors(
        self, params: SamplingParams, request_id: str, num_prompt: int, eos_ids: Sequence[int]
    ) -> list[BaseLogitsProcessor]:
        if not params.logits_processors:
            return []
        context = ProcessorContext(request_id, self.vocab_size, num_prompt, tuple(eos_ids))
        return create(params.logits_processors, context)

    def _argmax(self, logits: torch.Tensor, at: list[int], tokens: list[int]) -> None:
        """Fill in greedy tokens; unusable rows stay NO_TOKEN."""
        if self._is_cpu:
            # torch's argmax is single-threaded scalar code on CPU, several times slower than numpy's in fp32
            array = logits.float().numpy()
            ids = array.argmax(-1)  # the first NaN, if there is one
            best = array[np.arange(len(ids)), ids].tolist()
            chosen = ids.tolist()
        else:
            values, indices = logits.max(-1)
            best, chosen = values.tolist(), indices.tolist()
        for row, token, value in zip(at, chosen, best, strict=True):
            if _is_usable(value):
                tokens[row] = token

    def _process(
        self, work: torch.Tensor, rows: list[Row], at: list[int], tokens: list[int], errors: dict[int, BiremeError]
    ) -> None:
        """Edit the float32 copy `work` (rows, vocab) and choose from it."""
        errors.update((at[index], error) for index, error in self._change(work, rows).items())
        self._argmax(work, at, tokens)
        drawn = [i for i, row in enumerate(rows) if row.temperature and tokens[at[i]] != NO_TOKEN]
        if drawn:
            self._draw(work, drawn, rows, at, tokens)

    def _change(self, work: torch.Tensor, rows: list[Row]) -> dict[int, BiremeError]:
        errors: dict[int, BiremeError] = {}
        guided = [index for index, row in enumerate(rows) if row.guidance is not None and not row.guidance.is_free]
        bitmask = self._fill(guided, rows, errors) if guided else None  # first: a complete guide overrides min_tokens
        self._edit(work, rows)
        for index, row in enumerate(rows):
            if row.processors:
                try:
                    with row.mark:
                        self._run_processors(row, work[index])
                except BiremeError as error:
                    errors[index] = error
                    work[index].fill_(float("nan"))
        if bitmask is not None:
            apply(work, bitmask, guided)
        return errors

    def _run_processors(self, row: Row, logits_V: torch.Tensor) -> None:
        began = time.thread_time()
        for processor in row.processors:
            call(processor, row.history or [], logits_V)
            if (taken_s := time.thread_time() - began) > self._max_processor_s:
                raise RequestError(
                    f"logits_processors: one token took {taken_s * 1e3:.0f} ms of work; limits.max_processor_ms is"
                    f" {self._max_processor_s * 1e3:g}; send fewer or simpler ones"
                )

    def _fill(self, guided: list[int], rows: list[Row], errors: dict[int, BiremeError]) -> torch.Tensor:
        bitmask = outgoing((len(guided), num_words(self.vocab_size)), "int32", self._device)
        guides = [guidance for index in guided if (guidance := rows[index].guidance) is not None]
        found = self._filler.fill(guides, bitmask.numpy())
        errors.update((guided[position], error) for position, error in found.items())
        return bitmask

    def _edit(self, work: torch.Tensor, rows: list[Row]) -> None:
        """Apply bias, penalties and bans, in three steps for all rows."""
        flat = work.view(-1)
        biased = [(i, row) for i, row in enumerate(rows) if len(row.bias_ids)]
        if biased:
            places = self._places([(i, row.bias_ids) for i, row in biased])
            flat.index_add_(0, places, self._tensor(np.concatenate([row.bias_values for _, row in biased])))
        self._penalize(flat, rows)
        banned = [(i, ids) for i, row in enumerate(rows) if len(ids := row.banned())]
        if banned:
            flat.index_fill_(0, self._places(banned), float("-inf"))

    def _penalize(self, flat: torch.Tensor, rows: list[Row]) -> None:
        places, subtract, divide = [], [], []
        for i, row in enumerate(rows):
            counts = row.counts
            if counts is None or not len(counts.ids):
                continue
            places.append((i, counts.ids))
            subtract.append(
                counts.outputs * np.float32(row.frequency) + (counts.outputs > 0) * np.float32(row.presence)
            )
            divide.append(np.full(len(counts.ids), row.repetition, dtype=np.float32))
        if not places:
            return
        where = self._places(places)
        values, factor = flat[where], self._tensor(np.concatenate(divide))
        flat[where] = (values / factor).where(values > 0, values * factor) - self._tensor(np.concatenate(subtract))

    def _draw(self, work: torch.Tensor, drawn: list[int], rows: list[Row], at: list[int], tokens: list[int]) -> None:
        if self._draw_there is not None:
            found = self._draw_there(_pick(work, drawn), [rows[i] for i in drawn])
        else:
            array = _pick(work, drawn).cpu().numpy()
            keys = [draw_key(rows[i].seed, rows[i].num_output) for i in drawn]
            found = [filters.draw_row(array[n], rows[i], keys[n]) for n, i in enumerate(drawn)]
        for i, token in zip(drawn, found, strict=True):
            tokens[at[i]] = token

    def _places(self, ids: list[tuple[int, Any]]) -> torch.Tensor:
        return self._tensor(np.concatenate([tokens + i * self.vocab_size for i, tokens in ids]))

    def _tensor(self, array: Any) -> torch.Tensor:
        import torch

        return send(array, torch.device(self._device))


def _pick(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _append(logits: torch.Tensor, rows: list[Row], tokens: list[int], errors: dict[int, BiremeError]) -> None:
    for at, token in enumerate(tokens):
        if token == NO_TOKEN:
            errors.setdefault(at, _why_unusable(rows[at], is_own=_is_usable(float(logits[at].max()))))
            continue
        try:
            rows[at].append(token)
        except BiremeError as error:
            errors[at], tokens[at] = error, NO_TOKEN


def _why_unusable(row: Row, is_own: bool) -> BiremeError:
    """`is_own`: the model's own logits are finite."""
    if not is_own:
        return BiremeError("the model's logits are not finite; check the weights and the dtype")
    if row.guidance is not None and not row.guidance.is_free:
        return RequestError(
            "guided_decoding: the request's own bans, bias or processors exclude every token that the guide allows"
        )
    return RequestError(
        "the request's own logits_processors, bans, bias or penalties leave no token a finite score; weaken them"
    )


def _is_usable(value: float) -> bool:
    return -float("inf") < value < float("inf")


def _logprobs(logits: torch.Tensor, rows: list[Row], tokens: list[int]) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(rows)
    wanted = [at for at, row in enumerate(rows) if row.num_top is not None and tokens[at] != NO_TOKEN]
    if wanted:
        most = max(rows[at].num_top or 0 for at in wanted)
        entries = token_logprobs(_pick(logits, wanted), [tokens[at] for at in wanted], most)
        for at, entry in zip(wanted, entries, strict=True):
            found[at] = entry[: 1 + (rows[at].num_top or 0)]
    return found
