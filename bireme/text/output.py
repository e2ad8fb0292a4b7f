"""What a client gets of one generated sequence: tokens become text, and both become responses.

Tokens go out with the step that made them, text as soon as it is certain. Without stop strings the reader of a delta
makes its text, as a rule the thread that sends it. When a stop string is complete, `abort` is called once and the
engine's finish is awaited for its usage; then the reason is `stop`, whatever the engine says. Tokens after the one that
completed the stop string are neither delivered nor counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from bireme.coalescing import MAX_GROWTH
from bireme.messages import Finish, Logprobs, SamplingParams, TokenLogprobs, Usage
from bireme.text.detokenizer import Detokenizer
from bireme.text.stop import StopFinder
from bireme.types import Array, Response, Tensors

_json = msgspec.json.Encoder().encode
_NO_REASON: Array = np.array([b""], dtype=object)
_ENDED_WELL = ("stop", "length")


class TokenDelta:
    """New tokens of one sequence; later deltas of the same sequence merge into it.

    With a `detokenizer` the text is made when it is first asked for. Until its tokens or text are read the delta takes
    more: most steps cost no object and no call of their own. The deltas of a stream must be read in their order.
    """

    __slots__ = (
        "_detokenizer",
        "_is_sealed",
        "_lock",
        "_texts",
        "_tokens",
        "finish_reason",
        "index",
        "logprobs",
        "prompt_logprobs",
        "stop_string",
        "stop_token_id",
        "usage",
    )

    def __init__(
        self,
        tokens: list[int],
        text: str = "",
        logprobs: Logprobs = None,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
        index: int | None = None,
        finish_reason: str = "",
        usage: Usage | None = None,
        detokenizer: Detokenizer | None = None,
        stop_string: str = "",
        stop_token_id: int | None = None,
    ) -> None:
        self._tokens = tokens
        self._texts = [text] if text else []
        self.logprobs = logprobs  # one entry a token; None: not asked for
        self.prompt_logprobs = prompt_logprobs  # one entry a prompt token, the first is None
        self.index = index  # of n sequences; None: there is only one
        self.finish_reason = finish_reason  # "": it goes on
        self.usage = usage
        self.stop_string = stop_string  # what ended the sequence, if a stop string did
        self.stop_token_id = stop_token_id  # as above, if a token did; it is not among the tokens
        self._detokenizer = detokenizer  # makes the missing text; None: none is missing
        self._lock = threading.Lock()  # of `grow` against `_seal`
        self._is_sealed = False

    def grow(self, tokens: Sequence[int]) -> bool:
        """Take more tokens. Return False when the delta has been read."""
        with self._lock:
            if self._is_sealed or len(self._tokens) >= MAX_GROWTH:
                return False
            self._tokens += tokens
        return True

    @property
    def tokens(self) -> list[int]:
        self._seal()
        return self._tokens

    @property
    def text(self) -> str:
        self._seal()
        self._tell()
        return "".join(self._texts)

    def pieces(self) -> list[str]:
        """Return the text in pieces, one a token as a rule; none is empty."""
        self._seal()
        detokenizer, self._detokenizer = self._detokenizer, None
        if detokenizer is not None:
            self._texts += detokenizer.pieces(self._tokens)
            if self.finish_reason and (rest := detokenizer.flush()):
                self._texts.append(rest)
        return self._texts

    @property
    def is_last(self) -> bool:
        """With several sequences another one may still go on."""
        return bool(self.finish_reason) and self.index is None

    @property
    def num_bytes(self) -> int:
        """An estimate, for the limit on a slow reader's unsent responses, growth included."""
        if self.logprobs is None and self.prompt_logprobs is None:  # the path that has to be quick
            return 300 + 8 * (len(self._tokens) if self._detokenizer is None else max(MAX_GROWTH, len(self._tokens)))
        num_logprobs = sum(map(len, self.logprobs or ())) + sum(
            len(entry or ()) for entry in self.prompt_logprobs or ()
        )
        return 300 + 8 * len(self._tokens) + 100 * num_logprobs

    def merge(self, later: Response) -> TokenDelta | None:
        """Merge the later delta of the same sequence into this one; None when it is another sequence's."""
        if not isinstance(later, TokenDelta) or later.index != self.index or self.finish_reason:
            return None
        self._seal()
        later._seal()
        if self._detokenizer is None or self._detokenizer is not later._detokenizer:
            self._tell()
            later._tell()
        self._tokens += later._tokens
        self._texts += later._texts
        self.logprobs = _joined(self.logprobs, later.logprobs)
        self.prompt_logprobs = _joined(self.prompt_logprobs, later.prompt_logprobs)
        self.finish_reason = later.finish_reason
        self.usage = later.usage
        self.stop_string, self.stop_token_id = later.stop_string, later.stop_token_id
        return self

    def _seal(self) -> None:
        if not self._is_sealed:
            with self._lock:
                self._is_sealed = True

    def _tell(self) -> None:
        detokenizer, self._detokenizer = self._detokenizer, None
        if detokenizer is None:
            return
        self._texts.append(detokenizer.push(self._tokens))
        if self.finish_reason:
            self._texts.append(detokenizer.flush())

    def tensors(self) -> Tensors:
        outputs: dict[str, Array] = {
            "output_ids": np.array(self.tokens, dtype=np.int32),
            "text_output": _bytes(self.text.encode()),
            "finish_reason": _bytes(self.finish_reason.encode()) if self.finish_reason else _NO_REASON,
        }
        if self.logprobs is not None:
            outputs["log_probs"] = np.array([entry[0][1] for entry in self.logprobs], dtype=np.float32)
            if any(len(entry) > 1 for entry in self.logprobs):
                outputs["top_log_probs"] = _bytes(_json([_pairs(entry[1:]) for entry in self.logprobs]))
        if self.prompt_logprobs is not None:
            shown = [entry and _pairs(entry) for entry in self.prompt_logprobs]
            outputs["prompt_log_probs"] = _bytes(_json(shown))
        if self.usage is not None:
            outputs["usage"] = _bytes(_json(msgspec.structs.asdict(self.usage)))  # with its zeros
        if self.index is not None:
            outputs["index"] = np.array([self.index], dtype=np.int32)
        return outputs


def _ignore(*anything: object) -> None:
    pass


class TextStream:
    """The Sink of one sequence, called from any thread, one at a time. It never waits and never raises.

    `done` is called with each Finish: once, or more than once when the caller goes on with the same stream on another
    engine after an error. `finish_reason` is set when the sequence has ended well: then the last delta, with reason and
    usage, has been sent. Otherwise nothing was sent and the caller has the error.
    """

    __slots__ = (
        "_abort",
        "_detokenizer",
        "_done",
        "_finder",
        "_index",
        "_min_tokens",
        "_open",
        "_send",
        "_takes_prompt_logprobs",
        "finish_reason",
        "output_ids",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        sampling: SamplingParams,
        send: Callable[[TokenDelta], None],
        done: Callable[[Finish], None],
        abort: Callable[[], None],
        index: int | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._finder = StopFinder(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
        self._min_tokens = sampling.min_tokens or 0  # a stop string that these complete does not count
        self._send = send
        self._done = done
        self._abort = abort
        self._index = index
        self._takes_prompt_logprobs = False
        self._open: TokenDelta | None = None  # the last one sent, while it may still grow
        self.output_ids: list[int] = []  # all delivered tokens, replayed ones too; a migration sends them along
        self.finish_reason = ""

    def replay(self, tokens: Sequence[int]) -> None:
        """Take tokens that were delivered before (migration): their text is not sent again."""
        num_skipped = max(0, self._min_tokens - len(self.output_ids))
        self.output_ids += tokens
        text = self._detokenizer.push(tokens[:num_skipped])
        rest = self._detokenizer.push(tokens[num_skipped:])
        if self._finder is not None:
            self._finder.skip(text)
            self._finder.push(rest)

    def push(self, tokens: Sequence[int], logprobs: Logprobs = None, prompt_logprobs: Logprobs = None) -> None:
        if self._finder is not None:
            self._push_until_stop(tokens, logprobs, prompt_logprobs, self._finder)
            return
        self.output_ids += tokens
        if logprobs is not None or prompt_logprobs is not None:
            shown = self._prompt_logprobs(prompt_logprobs) if prompt_logprobs is not None else None
            self._open = None
            self._send(TokenDelta(list(tokens), "", logprobs, shown, self._index, detokenizer=self._detokenizer))
        elif self._open is None or not self._open.grow(tokens):
            self._open = delta = TokenDelta(list(tokens), index=self._index, detokenizer=self._detokenizer)
            self._send(delta)

    def finish(self, finish: Finish) -> None:
        is_stopped = self._finder is not None and self._finder.is_stopped
        if not is_stopped and finish.reason not in _ENDED_WELL:
            self._done(finish)
            return
        self._open = None
        text = ""
        if self._finder is not None and not is_stopped:
            text = self._rest(self._finder)
            is_stopped = self._finder.is_stopped
        detokenizer = self._detokenizer if self._finder is None else None
        self.finish_reason = "stop" if is_stopped else finish.reason
        usage = msgspec.structs.replace(finish.usage, completion_tokens=len(self.output_ids))
        stop_string = self._finder.stop_string if self._finder is not None else ""
        stop = None if is_stopped else finish.stop_token_id
        last = (self._index, self.finish_reason, usage, detokenizer, stop_string, stop)
        self._send(TokenDelta([], text, None, None, *last))
        self._done(finish)

    def close(self) -> None:
        """Drop the callbacks and ignore what still comes, so that their makers are freed without a collector."""
        self._send = self._done = self._abort = _ignore
        self._open = None

    def _push_until_stop(
        self,
        tokens: Sequence[int],
        logprobs: Logprobs,
        prompt_logprobs: Logprobs,
        finder: StopFinder,
    ) -> None:
        if finder.is_stopped:
            return
        taken, text = self._find_stop(tokens, finder)
        self.output_ids += taken
        shown = self._prompt_logprobs(prompt_logprobs) if prompt_logprobs is not None else None
        self._send(TokenDelta(taken, text, logprobs[: len(taken)] if logprobs else logprobs, shown, self._index))
        if finder.is_stopped:
            self._abort()

    def _find_stop(self, tokens: Sequence[int], finder: StopFinder) -> tuple[list[int], str]:
        """Return the tokens up to the one that completes a stop string, and the certain text."""
        num_skipped = self._min_tokens - len(self.output_ids)
        if len(tokens) == 1 and num_skipped <= 0:
            return list(tokens), finder.push(self._detokenizer.push(tokens))
        texts = []
        for at, token in enumerate(tokens):
            text = self._detokenizer.push((token,))
            texts.append(finder.skip(text) if at < num_skipped else finder.push(text))
            if finder.is_stopped:
                return list(tokens[: at + 1]), "".join(texts)
        return list(tokens), "".join(texts)

    def _rest(self, finder: StopFinder) -> str:
        """Return the text held back for characters or stop strings that will not be completed."""
        text = self._detokenizer.flush()
        return (finder.skip(text) if len(self.output_ids) <= self._min_tokens else finder.push(text)) + finder.flush()

    def _prompt_logprobs(self, entries: list[TokenLogprobs]) -> list[TokenLogprobs | None]:
        """Put None before the first entry: nothing predicts the first token of a prompt."""
        is_first, self._takes_prompt_logprobs = not self._takes_prompt_logprobs, True
        return [None, *entries] if is_first else list(entries)


def _pairs(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """Return (token, logprob) pairs in the order of their ranks, the tensors' form."""
    return [(item[0], item[1]) for item in entry]


def _bytes(value: bytes) -> Array:
    return np.array([value], dtype=object)


def _joined(first: list[Any] | None, later: list[Any] | None) -> list[Any] | None:
    if first is None or later is None:
        return later if first is None else first
    first += later
    return first
