"""What binds disaggregated_params to the request that they were made for: its prompt, pictures, salt and LoRA."""

from __future__ import annotations

from bireme import disagg
from bireme.messages import EngineRequest
from bireme.multimodal.wire import identity_of, unpack_opened


def request_digest(request: EngineRequest) -> str:
    """Return the digest of a request that the gate has admitted."""
    media = identity_of(unpack_opened(request.multimodal))
    return disagg.prompt_digest(request.prompt, request.cache_salt, request.lora_name, media)
