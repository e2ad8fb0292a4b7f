"""tensorrt_llm_bls: tensorrtllm_backend's own contract, translated to the requests of `generate`.

Each row of a batch is a request of its own. Its answers have row and sequence (batch_index, sequence_index): a response
a delta when streaming, else one a sequence, with the prompt before the answer unless exclude_input_in_output is true.
As in TensorRT-LLM, a request without top_k and top_p is greedy, whatever its temperature. Unsupported fields are
refused by name; their neutral values are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from bireme.errors import RequestError
from bireme.pipelines.answers import CollectedDeltas, RunningSums, draft_counts
from bireme.pipelines.sequence import SequenceRequest, SequenceRunner
from bireme.pipelines.side_by_side import run_sequences
from bireme.pipelines.text import TextPipeline
from bireme.request import GenerateRequest, parse_generate, read_tensors
from bireme.request_trace import RequestTrace
from bireme.specs import GENERATE, TENSORRT_LLM_BLS, ModelSpec
from bireme.text.output import TokenDelta
from bireme.types import Array, Inputs, Response, Send, Tensors, info_of

_REMEDIES = {
    "return_context_logits": "logits are not returned; ask `generate` for prompt_logprobs",
    "return_generation_logits": "logits are not returned; ask for return_log_probs, or `generate` for logprobs",
    "decoder_text_input": "models with an encoder for text are not served; leave it out",
    "image_input": "this model takes text; send pictures to `chat`, or to /v1/chat/completions",
    "image_bytes_input": "this model takes text; send pictures to `chat`, or to /v1/chat/completions",
    "image_url_input": "this model takes text; send pictures to `chat`, or to /v1/chat/completions",
    "video_bytes_input": "videos are not taken; leave it out",
    "prompt_embedding_table": "prompt tuning is not served; leave it out",
    "prompt_vocab_size": "prompt tuning is not served; leave it out",
    "prompt_table_extra_id": "prompt tuning is not served; to keep KV apart send cache_salt to `generate`",
    "num_draft_tokens": "speculative decoding is the recipe's (speculative_config); leave it out",
    "use_draft_logits": "speculative decoding is the recipe's (speculative_config); leave it out",
    "lora_task_id": "adapters are the recipe's, by name; send lora_name to `generate`",
    "lora_weights": "adapters are the recipe's, by name; send lora_name to `generate`",
    "lora_config": "adapters are the recipe's, by name; send lora_name to `generate`",
}
_RENAMED = {"min_length": "min_tokens"}
_RANDOM = ("top_k", "top_p")


class TensorrtLlmBls(TextPipeline):
    spec: ClassVar[ModelSpec] = TENSORRT_LLM_BLS

    def _parse(self, inputs: Tensors) -> list[GenerateRequest]:
        info, recipe = info_of(inputs), self._services.recipe
        return [parse_generate(Inputs(row, info), GENERATE, recipe) for row in rows_of(inputs, self.spec)]

    async def _serve(
        self, requests: list[GenerateRequest], send: Send, arrived_at: float, trace: RequestTrace | None
    ) -> list[SequenceRunner]:
        sequence_requests: list[SequenceRequest] = []
        answers: list[_BlsAnswer] = []
        for row, request in enumerate(requests):
            prompt = await self._tokenize(request, trace)
            of_row = self._sequence_requests(request, prompt, arrived_at, trace)
            places = [_Place(row, sequence, len(prompt), request.extras) for sequence in range(len(of_row))]
            echoed = (request.text or "") if request.echo else ""
            answers += [_BlsAnswer(send, place, request.stream, echoed) for place in places]
            sequence_requests += of_row
        outputs = [answer.add for answer in answers]
        sequences = await run_sequences(self._services, self._tokenizer, sequence_requests, outputs, arrived_at)
        for answer in answers:
            answer.end()
        return sequences


def rows_of(inputs: Tensors, spec: ModelSpec) -> list[dict[str, Array]]:
    """Return the inputs of `generate` for each row of a batch. Raises RequestError."""
    text = inputs.get("text_input")
    if text is None or text.ndim != 2:
        shape = "nothing" if text is None else f"shape {list(text.shape)}"
        raise RequestError(f"text_input: {shape}; send one string a row, shape [batch, 1]")
    for name, array in inputs.items():
        if array.ndim == 0 or len(array) != len(text):
            raise RequestError(f"{name}: shape {list(array.shape)}; the batch has {len(text)} rows")
    return [_row({name: array[row] for name, array in inputs.items()}, spec) for row in range(len(text))]


def _row(tensors: dict[str, Array], spec: ModelSpec) -> dict[str, Array]:
    for name in _REMEDIES.keys() & tensors.keys():
        _check_neutral(name, tensors.pop(name))
    values: dict[str, Any] = read_tensors(tensors, spec)
    row = {_RENAMED.get(name, name): array for name, array in tensors.items()}
    if not any(values.get(name) for name in _RANDOM):
        row = {name: array for name, array in row.items() if name not in (*_RANDOM, "temperature")}
    if not values.get("stream"):
        row.setdefault("exclude_input_in_output", np.array([False]))
    return row


def _check_neutral(name: str, array: Array) -> None:
    if any(item not in (b"", "") for item in array.flat) if array.dtype == np.object_ else array.any():
        value = array.flat[0] if array.size == 1 else f"shape {list(array.shape)}"
        raise RequestError(f"{name}: {_shown(value)}; {_REMEDIES[name]}")


def _shown(value: Any) -> str:
    return (value.decode(errors="replace") if isinstance(value, bytes) else str(value))[:80]


@dataclass(frozen=True, slots=True)
class _Place:
    row: int
    sequence: int
    num_input_tokens: int
    extras: frozenset[str]


class _BlsAnswer:
    """Sends one sequence: each delta, or everything at its end."""

    def __init__(self, send: Send, place: _Place, streams: bool, echoed: str) -> None:
        self._send, self._place, self._tally, self._echoed = send, place, RunningSums(), echoed
        self._whole = None if streams else CollectedDeltas()

    def add(self, delta: TokenDelta) -> None:
        if self._whole is not None:
            self._whole.add(delta)
            return
        self._tally.count(delta)
        self._send(_RowPart(delta, self._place, self._tally))

    def end(self) -> None:
        if self._whole is not None:
            delta = self._whole.joined()
            self._tally.count(delta)
            self._send(_RowPart(delta, self._place, self._tally, self._echoed))


class _RowPart:
    """One response; later parts of the same sequence merge into it."""

    __slots__ = ("_delta", "_echoed", "_logprob", "_num_tokens", "_place")

    def __init__(self, delta: TokenDelta, place: _Place, tally: RunningSums, echoed: str = "") -> None:
        self._delta, self._place, self._echoed = delta, place, echoed
        self._logprob, self._num_tokens = tally.logprob, tally.num_tokens

    def merge(self, later: Response) -> Response | None:
        if not isinstance(later, _RowPart) or self._place is not later._place:
            return None
        if self._delta.merge(later._delta) is None:
            return None
        self._logprob, self._num_tokens = later._logprob, later._num_tokens
        return self

    def tensors(self) -> Tensors:
        delta, place = self._delta, self._place
        log_probs = [entry[0].logprob for entry in delta.logprobs or ()]
        extras: dict[str, Callable[[], Array]] = {
            "cum_log_probs": lambda: np.array([[self._logprob]], np.float32),
            "output_log_probs": lambda: np.array([[log_probs]], np.float32),
            "num_input_tokens": lambda: np.array([[place.num_input_tokens]], np.int32),
            "num_output_tokens": lambda: np.array([[self._num_tokens]], np.int32),
        }
        drafts = draft_counts([delta.usage]) if delta.usage is not None else {}
        return {
            "text_output": np.array([(self._echoed + delta.text).encode()], np.object_),
            "batch_index": np.array([[place.row]], np.int32),
            "sequence_index": np.array([[place.sequence]], np.int32),
            **{name: extras[name]() for name in place.extras if name in extras},
            **{name: array[None] for name, array in drafts.items() if name in place.extras},
        }
