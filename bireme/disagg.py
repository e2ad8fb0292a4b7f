"""DisaggregatedParams: what prefill hands to decode, signed so that clients can carry it but not make it.

It names a worker, a lease and its generation, never an address: workers' addresses come from discovery. Wire form:
base64url(JSON) + "." + base64url(HMAC-SHA256 of a purpose and the first part), as ASCII bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Any

import msgspec

from bireme.errors import RequestError
from bireme.messages import RequestType, TokenLogprobs

MAX_BYTES = 1 << 20
# What the deployment's key has signed for one purpose serves no other. None is the beginning of another.
PARAMS, EMBEDDINGS = b"bireme params:", b"bireme embeddings:"


class DisaggregatedParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """TensorRT-LLM's field names where it has them."""

    v: int = 1
    request_type: RequestType = "generation_only"  # what the receiver is to do
    worker: str  # name of the exporting worker, as in discovery
    life: int  # the exporter's life: after its restart the lease is gone
    lease_id: int
    generation: int
    num_tokens: int  # KV rows exported: all prompt tokens
    first_gen_tokens: tuple[int, ...] = ()
    first_gen_log_probs: tuple[TokenLogprobs, ...] | None = None
    ctx_request_id: int = 0
    draft_tokens: tuple[int, ...] = ()
    opaque_state: str = ""  # base64; the engine's own
    engine_state: dict[str, Any] = {}  # the engine's own, plain JSON: TensorRT-LLM's further fields by name
    expires_at: float = 0.0  # Unix time when the exporter frees the KV by itself; 0: the lease tells
    prompt_digest: str = ""  # hex SHA-256 of prompt ids, salt and LoRA: params serve no other prompt
    is_canary: bool = False  # its transfer is no load
    prefill_ms: float = 0.0
    queue_ms: float = 0.0
    cached_tokens: int = 0
    head: str = ""  # digest of the drafting head whose rows of all these tokens come with the KV; "": none


_decode = msgspec.json.Decoder(DisaggregatedParams, strict=True).decode


def seal(params: DisaggregatedParams, key: bytes) -> bytes:
    return sign(msgspec.json.encode(params), key, PARAMS)


def unseal(blob: bytes, key: bytes) -> DisaggregatedParams:
    """Check the signature (constant time) and decode. Raises RequestError."""
    if len(blob) > MAX_BYTES:
        raise RequestError(f"disaggregated_params: {len(blob)} bytes; the limit is {MAX_BYTES}")
    payload = verify("disaggregated_params", blob, key, PARAMS, "prefill")
    try:
        params = _decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RequestError(f"disaggregated_params: {error}") from error
    if params.v != 1:
        raise RequestError(f"disaggregated_params: version {params.v}; this build reads version 1")
    return params


def sign(payload: bytes, key: bytes, purpose: bytes) -> bytes:
    text = base64.urlsafe_b64encode(payload)
    return text + b"." + _signature(purpose + text, key)


def verify(name: str, blob: bytes, key: bytes, purpose: bytes, maker: str) -> bytes:
    """Return the signed payload. Raises RequestError, which begins with `name`; the check takes constant time."""
    text, separator, signature = bytes(blob).rpartition(b".")
    if not separator or not hmac.compare_digest(signature, _signature(purpose + text, key)):
        raise RequestError(f"{name}: bad signature; pass on what this deployment's {maker} returned, unchanged")
    try:
        return base64.urlsafe_b64decode(text)
    except binascii.Error as error:
        raise RequestError(f"{name}: {error}") from error


def prompt_digest(prompt: bytes, cache_salt: str, lora_name: str, media: bytes = b"") -> str:
    """Return the digest that binds params to their prompt.

    `prompt`: int32 little-endian ids; `media`: bytes that stand for its pictures (multimodal/wire.py).
    """
    digest = hashlib.sha256()
    for part in (prompt, cache_salt.encode(), lora_name.encode(), *([media] if media else [])):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _signature(payload: bytes, key: bytes) -> bytes:
    return base64.urlsafe_b64encode(hmac.digest(key, payload, "sha256"))
