"""What this stand-in can do wrong, one feature a way, for tests of what must notice it.

TRTLLM_STAND_IN_BROKEN names ways, with commas between them. A test in the same process takes one as
(object, attribute, replacement) from WAYS, and engines that are there already break as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tensorrt_llm import _blocks, _executor, _handoff, _llm, _sampling

Way = tuple[Any, str, Any]
_Executor, _Chooser, _Guide = _executor.Executor, _sampling.Chooser, _sampling.Guide


def break_named(names: str) -> None:
    for name in names.split(","):
        setattr(*WAYS[name]())


def _without(change: Callable[[Any], None]) -> Callable[[], Way]:
    """A request loses something on its way to the worker."""

    def way() -> Way:
        plain = _Executor.submit

        def submit(self: Any, sequence: Any) -> None:
            change(sequence)
            plain(self, sequence)

        return _Executor, "submit", submit

    return way


def _without_param(*names: str) -> Callable[[], Way]:
    def change(sequence: Any) -> None:
        for name in names:
            setattr(sequence.params, name, None)

    return _without(change)


def _instead(owner: Any, name: str, replacement: Any) -> Callable[[], Way]:
    return lambda: (owner, name, replacement)


def _wrong_tokens(when: Callable[[Any, Any], bool]) -> Callable[[], Way]:
    """The token after the right one, where `when` (executor, sequence) says so."""

    def way() -> Way:
        plain = _Executor._take

        def take(self: Any, one: Any, token: int, logprobs: Any) -> None:
            plain(self, one, (token + 1) % self._config.vocab_size if when(self, one) else token, logprobs)

        return _Executor, "_take", take

    return way


def _unheeded(*names: str) -> Callable[[], Way]:
    def way() -> Way:
        plain = _Chooser._heeded
        return _Chooser, "_heeded", lambda self, name: None if name in names else plain(self, name)

    return way


def _no_load(self: Any) -> None:
    raise RuntimeError("Executor worker returned error") from ValueError("planted")


def _half_logprobs() -> Way:
    plain = _Chooser.logprobs

    def logprobs(self: Any, logits: Any, token: int, count: int | None) -> Any:
        found = plain(self, logits, token, count)
        for value in (found or {}).values():
            value.logprob /= 2
        return found

    return _Chooser, "logprobs", logprobs


def _no_prompt_logprobs() -> Way:
    plain = _Executor._response

    def response(self: Any, one: Any) -> Any:
        one.prompt_logprobs = None
        return plain(self, one)

    return _Executor, "_response", response


def _any_token() -> Way:
    plain = _Chooser._draw

    def draw(self: Any, work: Any) -> int:
        self._params.top_k = None
        return plain(self, work)

    return _Chooser, "_draw", draw


def _no_export() -> Way:
    plain = _Executor._end

    def end(self: Any, one: Any, reason: str, stop_reason: int | None = None, exported: Any = None) -> None:
        plain(self, one, reason, stop_reason)

    return _Executor, "_end", end


def _zeros() -> Way:
    plain = _handoff.fill

    def fill(cache: Any, layers: Any) -> Any:
        return plain(cache, [(keys.zero_(), values.zero_()) for keys, values in layers])

    return _handoff, "fill", fill


def _fatal_guide() -> Way:
    plain = _Executor._guide

    def guide(self: Any, params: Any, vocab_size: int) -> Any:
        try:
            return plain(self, params, vocab_size)
        except Exception as error:
            raise SystemExit(str(error)) from error  # which the request's own care does not catch

    return _Executor, "_guide", guide


def _fewer_parameters() -> Way:
    method = _llm.BaseLLM.generate_async
    signature = method.__signature__  # type: ignore[attr-defined]
    left = [one for one in signature.parameters.values() if one.name != "cache_salt"]
    return method, "__signature__", signature.replace(parameters=left)


WAYS: dict[str, Callable[[], Way]] = {
    "contract": _fewer_parameters,
    "start": _instead(_llm.BaseLLM, "_load", _no_load),
    "generate": _wrong_tokens(lambda executor, one: one.num_output == 3),
    "batch": _wrong_tokens(lambda executor, one: len(executor._running) > 1),
    "stream": _without(lambda sequence: setattr(sequence, "streaming", False)),
    "stop ids": _without_param("stop_token_ids"),
    "end id": _without_param("end_id"),
    "cancel": _instead(_Executor, "abort", lambda self, client_id: None),
    "log probabilities": _half_logprobs,
    "prompt log probabilities": _no_prompt_logprobs,
    "sampling": _any_token,
    "seeds": _unheeded("seed"),
    "penalties": _unheeded("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "bad words": _unheeded("bad_token_ids"),
    "bias": _without_param("embedding_bias"),
    "least tokens": _without_param("min_tokens"),
    "processors": _instead(_Chooser, "process", lambda self, logits, tokens: None),
    "guides": _instead(_Guide, "mask", lambda self, logits: None),
    "reuse": _instead(_blocks.BlockAccounts, "match", lambda self, *request: 0),
    "salts": _without(lambda sequence: setattr(sequence, "salt", "")),
    "KV events": _instead(_blocks.BlockAccounts, "_event", lambda self, body, rank: None),
    "statistics": _instead(_Executor, "_stats", lambda self, began: {}),
    "times": _instead(_Executor, "_perf", lambda self, one, reason: (None, {})),
    "errors": _fatal_guide,
    "drafts": _wrong_tokens(
        lambda executor, one: executor._args.speculative_config is not None and one.num_output == 3
    ),
    "export": _no_export,
    "KV": _zeros,
    "transfer": _instead(_handoff, "claim", lambda params: None),
    "hang": _instead(_Chooser, "_draw", lambda self, work: time.sleep(3600)),
}
