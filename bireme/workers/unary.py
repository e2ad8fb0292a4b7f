"""Tensors of the unary calls that a pipeline makes; the same inside Triton (BLS) and outside (gRPC)."""

from __future__ import annotations

import msgspec
import numpy as np

from bireme.errors import BiremeError
from bireme.messages import EngineRequest, SamplingParams, TokenLogprobs, Usage, encode
from bireme.multimodal.wire import EncodeAnswer, EncodeJob, decode_answer_json, encode_job
from bireme.types import Array, Tensors
from bireme.workers.base import PrefillResult

_decode_usage = msgspec.json.Decoder(Usage).decode
_decode_logprobs = msgspec.json.Decoder(list[TokenLogprobs | None]).decode


def tokenize_inputs(text: str) -> dict[str, Array]:
    return {"text_input": _bytes(text.encode())}


def input_ids(outputs: Tensors) -> list[int]:
    ids: list[int] = _output(outputs, "input_ids").reshape(-1).tolist()
    return ids


def prefill_inputs(request: EngineRequest, request_id: str) -> dict[str, Array]:
    """The request travels whole, as `engine_request`: what has no tensor of its own must not get lost."""
    return {
        "engine_request": np.frombuffer(encode(request), np.uint8),
        "request_id": _bytes(request_id.encode()),
    }


def prefill_result(outputs: Tensors) -> PrefillResult:
    return PrefillResult(
        bytes(_output(outputs, "disaggregated_params").reshape(-1)[0]),
        tuple(_output(outputs, "output_ids").reshape(-1).tolist()),
        _decode_usage(bytes(_output(outputs, "usage").reshape(-1)[0])),
        _prompt_logprobs(outputs),
    )


def _prompt_logprobs(outputs: Tensors) -> list[TokenLogprobs] | None:
    if "prompt_log_probs" not in outputs:
        return None
    entries = _decode_logprobs(bytes(outputs["prompt_log_probs"].reshape(-1)[0]))
    return [entry for entry in entries if entry is not None]


def encode_request(job: EncodeJob, timeout_ms: int) -> EngineRequest:
    return EngineRequest(
        prompt=b"",
        sampling=SamplingParams(),
        request_type="encode_only",
        timeout_ms=timeout_ms,
        multimodal=encode_job(job),
    )


def encode_answer(outputs: Tensors) -> EncodeAnswer:
    return decode_answer_json(bytes(_output(outputs, "embedding_handles").reshape(-1)[0]))


def abort_inputs(request_id: str) -> dict[str, Array]:
    return {"abort": np.array([True]), "request_id": _bytes(request_id.encode())}


def _bytes(value: bytes) -> Array:
    array = np.empty(1, np.object_)  # np.array([value], object) would work too, but not for an empty string
    array[0] = value
    return array


def _output(outputs: Tensors, name: str) -> Array:
    if name not in outputs:
        raise BiremeError(f"{name}: the worker's answer lacks it; run the same build on both sides")
    return outputs[name]
