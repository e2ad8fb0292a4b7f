"""TensorRT-LLM's DisaggregatedParams to ours and back.

bytes travel as base64, log probabilities as lists of {token_id, logprob, rank}; every other set field of this release
travels by name in `engine_state`, so that fields of later releases pass too. Handles of embeddings are for prefill
alone and never go on to decode.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bireme.disagg import DisaggregatedParams
from bireme.engines.trtllm.api import Api
from bireme.engines.trtllm.logprobs import token_logprobs
from bireme.errors import NotFoundError, RequestError
from bireme.multimodal.wire import OpenedItem, identity_of

_NOT_STATE = {  # fields of ours, and what is left behind
    *("request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens", "first_gen_log_probs"),
    *("multimodal_embedding_handles", "multimodal_hashes", "multimodal_item_runs", "first_gen_logits"),
}
_EPOCH_S = 1_577_836_800  # 2020-01-01


def export(given: Any, api: Api) -> dict[str, Any]:
    """Return the fields of our DisaggregatedParams that a context_only result fills; {}: it exported nothing.

    A result has params from its start, the request's own. Only its opaque state (C++ transceiver) or the endpoint of
    the exporter (Python transceiver) say that there is KV to fetch; disagg_request_id is ours.
    """
    if not given.opaque_state and not getattr(given, "ctx_info_endpoint", None):
        return {}
    names = sorted(api.disaggregated_fields - _NOT_STATE)
    state = {name: value for name in names if (value := getattr(given, name)) is not None}
    tokens = tuple(given.first_gen_tokens or ())
    log_probs = None
    if entries := getattr(given, "first_gen_log_probs", None):
        state["first_gen_log_probs"] = list(map(_plain_entry, entries))
        log_probs = tuple(map(token_logprobs, entries, tokens))
    return {
        "first_gen_tokens": tokens,
        "first_gen_log_probs": log_probs,
        "ctx_request_id": given.ctx_request_id or 0,
        "draft_tokens": tuple(given.draft_tokens or ()),
        "opaque_state": base64.b64encode(given.opaque_state or b"").decode(),
        "engine_state": msgspec.to_builtins(state, enc_hook=_plain),
    }


def restore(params: DisaggregatedParams, api: Api) -> Any:
    """For generation_only. Raises RequestError."""
    try:
        opaque = base64.b64decode(params.opaque_state, validate=True)
    except binascii.Error as error:
        raise RequestError(f"disaggregated_params.opaque_state: not base64: {error}") from error
    fields = {name: value for name, value in params.engine_state.items() if name in api.disaggregated_fields}
    if "first_gen_log_probs" in fields:
        fields["first_gen_log_probs"] = [_entry(one, api) for one in fields["first_gen_log_probs"]]
    if "schedule_style" in fields:
        del fields["schedule_style"]  # an enum of the receiver's own; the default is context first
    return api.disaggregated_params(
        **fields,
        request_type="generation_only",
        first_gen_tokens=list(params.first_gen_tokens),
        ctx_request_id=params.ctx_request_id,
        opaque_state=opaque or None,
        draft_tokens=list(params.draft_tokens) or None,
    )


def context_only(api: Api, ids: RequestIds) -> Any:
    """For a prefill; its pictures come later (pictures.py)."""
    fields: dict[str, Any] = {}
    if "disagg_request_id" in api.disaggregated_fields:
        fields["disagg_request_id"] = ids.next()
    return api.disaggregated_params(request_type="context_only", **fields)


def salt_of(cache_salt: str, kind: str, pictures: tuple[OpenedItem, ...]) -> str:
    """On decode TensorRT-LLM would take its blocks for those of any other pictures."""
    if kind != "generation_only" or not pictures:
        return cache_salt
    digest = hashlib.blake2b(identity_of(pictures), digest_size=16).hexdigest()
    return f"{cache_salt} pictures {digest}"


class RequestIds:
    """Ids that no other worker of the deployment makes: milliseconds, worker, counter (41, 10 and 12 bits).

    TensorRT-LLM keeps numbers below 2**42 for its own.
    """

    def __init__(self, worker: str, life: int) -> None:
        self._machine = _hash_of(f"{worker} {life}") & 0x3FF
        self._counter = itertools.count()

    def next(self) -> int:
        milliseconds = int((time.time() - _EPOCH_S) * 1e3) & ((1 << 41) - 1)
        return milliseconds << 22 | self._machine << 12 | next(self._counter) & 0xFFF


def _hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Claims:
    """Which exports this engine has claimed. TensorRT-LLM would wait for a missing one until its time limit."""

    def __init__(self) -> None:
        self._claimed: dict[tuple[str, int, int], float] = {}  # -> when the export ends anyway

    def claim(self, params: DisaggregatedParams) -> None:
        """Raises NotFoundError for one that was claimed before, or has expired."""
        now = time.time()
        if params.expires_at and now > params.expires_at:
            raise NotFoundError("disaggregated_params: the prefill has freed this KV, its time was over; prefill again")
        self._claimed = {key: until for key, until in self._claimed.items() if until > now}
        key = (params.worker, params.life, params.lease_id)
        if key in self._claimed:
            raise NotFoundError("disaggregated_params: this KV was fetched before; each prefill serves one decode")
        self._claimed[key] = params.expires_at or now + 3600


def _plain_entry(entry: Mapping[int, Any]) -> list[dict[str, Any]]:
    return [{"token_id": token, "logprob": value.logprob, "rank": value.rank} for token, value in entry.items()]


def _entry(items: Sequence[Mapping[str, Any]], api: Api) -> dict[int, Any]:
    return {item["token_id"]: api.logprob(logprob=item["logprob"], rank=item["rank"]) for item in items}


def _plain(value: Any) -> Any:
    raise RequestError(f"disaggregated_params: a {type(value).__name__} can't travel to decode")
