"""Completions in OpenAI's form: text_completion objects, whole or as events."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from bireme.messages import TokenLogprobs, Usage
from bireme.openai.http.event_stream import PREFIX, SUFFIX, EventStream
from bireme.pipelines.chat_answer import ResponseMeta, encode_json, ids_of
from bireme.pipelines.chat_usage import NO_NVEXT, NvExtReply, drafts_json, timing_json, usage_json
from bireme.pipelines.token_logprobs import LOWEST, TokenTexts
from bireme.text.output import TokenDelta


def batch_usage(usages: Sequence[Usage], n: int) -> dict[str, Any]:
    parts = [usage_json(usages[at : at + n]) for at in range(0, len(usages), n)]
    total = {name: sum(part[name] for part in parts) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    cached = sum(part["prompt_tokens_details"]["cached_tokens"] for part in parts)
    drafts = drafts_json(usages)
    details = {"completion_tokens_details": drafts} if drafts else {}
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}, **details}


class LogprobColumns:
    """The columns of a choice's `logprobs`, of an echoed prompt's tokens too. Offsets count characters of its text."""

    def __init__(self, texts: TokenTexts, num_top: int, first_token: int | None, skips_special_tokens: bool) -> None:
        """`first_token` of an echoed prompt: nothing predicts it, so no entry names it."""
        self._texts, self._num_top = texts, num_top
        self._first_token, self._skips_special_tokens = first_token, skips_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters so far

    def show(
        self, entries: Sequence[TokenLogprobs], prompt: Sequence[TokenLogprobs | None] | None = None
    ) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in (*(prompt or ()), *entries):
            token = self._first_token if entry is None else entry[0][0]
            assert token is not None, "only an echoed prompt begins with a token that nothing predicts"
            columns["tokens"].append(self._texts.unique_text(token))
            columns["token_logprobs"].append(None if entry is None else max(entry[0][1], LOWEST))
            columns["top_logprobs"].append(None if entry is None else self._top(entry))
            columns["text_offset"].append(self._offset)
            if not (self._skips_special_tokens and self._texts.is_special(token)):
                self._offset += len(self._decoder.decode(self._texts.data(token)))
        return columns

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest, and the chosen token if it is not among them, as OpenAI does."""
        shown: dict[str, float] = {}
        for token, value, _ in (*entry[1 : 1 + self._num_top], entry[0]):
            shown.setdefault(self._texts.unique_text(token), max(value, LOWEST))
        return shown


def without_tokens(delta: TokenDelta) -> TokenDelta:
    """Return a delta's prompt part and end: for a request that wants no token, though one was made."""
    usage = None if delta.usage is None else msgspec.structs.replace(delta.usage, completion_tokens=0)
    reason = "length" if delta.finish_reason else ""
    return TokenDelta([], prompt_logprobs=delta.prompt_logprobs, finish_reason=reason, usage=usage)


class CompletionTemplate:
    """Makes the events of one answer; only the text is encoded."""

    def __init__(self, heading: ResponseMeta, count: int, include_usage: bool) -> None:
        self._head = b'%b{"id":"%b","object":"text_completion","created":%d,"model":%b,"choices":[' % (
            PREFIX,
            heading.id.encode(),
            heading.created,
            encode_json(heading.model),
        )
        self._texts = [b'%b{"index":%d,"text":' % (self._head, index) for index in range(count)]
        self._end = (b'],"usage":null}' if include_usage else b"]}") + SUFFIX
        self._text_end = b',"logprobs":null,"finish_reason":null}' + self._end

    def text(self, index: int, text: str) -> bytes:
        return self._texts[index] + encode_json(text) + self._text_end

    def texts(self, index: int, jsons: Iterable[bytes]) -> bytes:
        head, tail = self._texts[index], self._text_end
        return head + (tail + head).join(jsons) + tail

    def full(
        self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None, ids: dict[str, Any]
    ) -> bytes:
        """`ids`: fields of a choice that tells its token ids."""
        more = b"," + encode_json(ids)[1:] if ids else b"}"
        tail = b',"logprobs":%b,"finish_reason":%b%b' % (encode_json(logprobs), encode_json(reason), more)
        return self._texts[index] + encode_json(text) + tail + self._end

    def last(self, fields: dict[str, Any]) -> bytes:
        return self._head + b"]," + encode_json(fields)[1:] + SUFFIX


class StreamedCompletion:
    def __init__(
        self, template: CompletionTemplate, stream: EventStream, echoes: list[str], columns: list[LogprobColumns] | None
    ) -> None:
        self._template, self._stream, self._columns = template, stream, columns
        self._echoes = echoes  # one a choice; "" for none, or once it is out
        self.usages: list[Usage] = [Usage() for _ in echoes]
        self._num_open = len(echoes)
        self.n, self.include_usage, self.has_timing = 1, False, False
        self.prompts: list[list[int]] | None = None  # ids, one a choice; [] once they are out. None: no ids are wanted
        self.nvext = NO_NVEXT
        self.annotations = b""  # events before all others

    def add(self, index: int, delta: TokenDelta) -> None:
        if self.annotations:
            self._stream.chunk(self.annotations)
            self.annotations = b""
        echo, self._echoes[index] = self._echoes[index], ""
        if self._columns is not None and (delta.logprobs or delta.prompt_logprobs):
            columns = self._columns[index].show(delta.logprobs or (), delta.prompt_logprobs)
            self._stream.chunk(self._template.full(index, echo + delta.text, columns, None, self._ids(index, delta)))
        elif self.prompts is not None:
            self._add_ids(index, echo, delta)
        elif echo:
            self._stream.text(index, echo + delta.text)
        else:
            self._stream.delta(index, delta)
        if delta.finish_reason:
            self._finish(index, delta)

    def _add_ids(self, index: int, echo: str, delta: TokenDelta) -> None:
        if delta.tokens or delta.text or echo:
            self._stream.chunk(self._template.full(index, echo + delta.text, None, None, self._ids(index, delta)))

    def _ids(self, index: int, delta: TokenDelta) -> dict[str, Any]:
        """Return the fields of new ids, the prompt's among them the first time."""
        if self.prompts is None:
            return {}
        prompt, self.prompts[index] = self.prompts[index], []
        return ({"prompt_token_ids": prompt} if prompt else {}) | {"token_ids": delta.tokens}

    def _finish(self, index: int, delta: TokenDelta) -> None:
        ids = {} if self.prompts is None else {"token_ids": ids_of(delta)[len(delta.tokens) :]}
        self._stream.chunk(self._template.full(index, "", None, delta.finish_reason, ids))
        self.usages[index] = delta.usage or Usage()
        self._num_open -= 1
        if self._num_open:
            return
        fields: dict[str, Any] = {}
        if self.include_usage:
            fields["usage"] = batch_usage(self.usages, self.n)
        if self.has_timing:
            fields["bireme"] = timing_json(self.usages)
        fields |= self.nvext.json(self.usages)
        if fields:
            self._stream.chunk(self._template.last(fields))
        self._stream.end()


class WholeCompletion:
    def __init__(self, heading: ResponseMeta, echoes: list[str], columns: list[LogprobColumns] | None) -> None:
        self._heading, self._columns = heading, columns
        self._echoes = echoes
        self._deltas: list[list[TokenDelta]] = [[] for _ in echoes]  # their text is made at the end
        self._prompts: list[list[TokenLogprobs | None]] = [[] for _ in echoes]  # of their tokens
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in echoes]
        self._reasons = [""] * len(echoes)
        self.prompts: list[list[int]] | None = None  # ids, one a choice; None: no ids are wanted
        self.usages: list[Usage] = [Usage() for _ in echoes]

    def add(self, index: int, delta: TokenDelta) -> None:
        self._deltas[index].append(delta)
        self._prompts[index] += delta.prompt_logprobs or ()
        self._logprobs[index] += delta.logprobs or ()
        if delta.finish_reason:
            self._reasons[index] = delta.finish_reason
            self.usages[index] = delta.usage or Usage()

    def json(self, n: int, has_timing: bool, nvext: NvExtReply = NO_NVEXT) -> bytes:
        body = {
            "id": self._heading.id,
            "object": "text_completion",
            "created": self._heading.created,
            "model": self._heading.model,
            "choices": [self._choice(index) for index in range(len(self._echoes))],
            "usage": batch_usage(self.usages, n),
        }
        if has_timing:
            body["bireme"] = timing_json(self.usages)
        return encode_json(body | nvext.json(self.usages))

    def _choice(self, index: int) -> dict[str, Any]:
        columns = self._columns[index] if self._columns is not None else None
        logprobs = columns and columns.show(self._logprobs[index], self._prompts[index])
        text = self._echoes[index] + "".join([delta.text for delta in self._deltas[index]])
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._reasons[index]}
        if self.prompts is None:
            return choice
        ids = [token for delta in self._deltas[index] for token in ids_of(delta)]
        return choice | {"prompt_token_ids": self.prompts[index], "token_ids": ids}
