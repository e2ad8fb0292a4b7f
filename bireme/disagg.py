"""DisaggregatedParams: what prefill hands to decode, signed so that clients can carry it but not make it.

It names a worker, a lease and its generation, never an address: workers' addresses come from discovery.
Wire form: base64url(JSON) + "." + base64url(HMAC-SHA256 of the first part), as ASCII bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

import msgspec

from bireme.errors import RequestError
from bireme.messages import RequestType, TokenLogprobs

MAX_BYTES = 1 << 20


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
    prompt_digest: str = (
        ""  # hex SHA-256 of the prompt ids, salt and LoRA: params serve only the prompt they were made for
    )
    prefill_ms: float = 0.0
    queue_ms: float = 0.0
    cached_tokens: int = 0


_decode = msgspec.json.Decoder(DisaggregatedParams, strict=True).decode


def seal(params: DisaggregatedParams, key: bytes) -> bytes:
    """Return the signed wire form."""
    payload = base64.urlsafe_b64encode(msgspec.json.encode(params))
    return payload + b"." + _signature(payload, key)


def unseal(blob: bytes, key: bytes) -> DisaggregatedParams:
    """Check the signature (constant time) and decode. Raises RequestError."""
    if len(blob) > MAX_BYTES:
        raise RequestError(f"disaggregated_params: {len(blob)} bytes; the limit is {MAX_BYTES}")
    payload, separator, signature = bytes(blob).rpartition(b".")
    if not separator or not hmac.compare_digest(signature, _signature(payload, key)):
        raise RequestError(
            "disaggregated_params: bad signature; pass on what this deployment's prefill returned, unchanged"
        )
    try:
        params = _decode(base64.urlsafe_b64decode(payload))
    except (binascii.Error, msgspec.DecodeError) as error:
        raise RequestError(f"disaggregated_params: {error}") from error
    if params.v != 1:
        raise RequestError(f"disaggregated_params: version {params.v}; this build reads version 1")
    return params


def prompt_digest(prompt: bytes, cache_salt: str, lora_name: str) -> str:
    """Return the digest that binds params to their prompt (`prompt`: int32 little-endian ids)."""
    digest = hashlib.sha256()
    for part in (prompt, cache_salt.encode(), lora_name.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _signature(payload: bytes, key: bytes) -> bytes:
    return base64.urlsafe_b64encode(hmac.digest(key, payload, "sha256"))
