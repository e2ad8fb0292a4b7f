"""What an engine process accepts: every submit is checked here, because the stub passes bus commands on unread.

Lengths: a prompt must leave room for one token. `max_tokens` counts resumed tokens as well; above what is left of the
context it is clamped, unset it is all that is left, zero or less is refused. Values above the recipe's limits are never
clamped: the error names the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from bireme import disagg
from bireme.canary_mark import is_canary
from bireme.config import Limits
from bireme.engines.base import AdmittedRequest, AdmittedTexts
from bireme.errors import RequestError, ResourceExhaustedError, UnavailableError
from bireme.guides import parse_guide
from bireme.messages import Capacity, EmbedRequest, EngineRequest, SamplingParams
from bireme.multimodal.wire import OpenedItem, identity_of, open_multimodal
from bireme.parameters import PARAMETERS, Parameter
from bireme.request import check_text_tokens
from bireme.request_trace import MAX_TRACESTATE_CHARACTERS, parse_traceparent
from bireme.serving_options import check_options

_ANY = 1e9  # finite, and more than any sensible value
_RANGED = tuple((row.name, row) for row in PARAMETERS if row.is_field and row.has_range)


@dataclass(frozen=True, slots=True)
class Gate:
    stage: str
    capacity: Capacity
    limits: Limits
    key: bytes  # the deployment's, for disaggregated_params
    has_transfer: bool = False
    max_input_len: int | None = None
    worker: str = ""  # its id among several servers; "": it has one server's workers for company

    def admit(self, request: EngineRequest) -> AdmittedRequest:
        """Raises RequestError."""
        if self.capacity.embedding_size:
            raise RequestError(f"request_type: {request.request_type}; this worker makes embeddings, no tokens")
        if not self.capacity.vocab_size:
            raise RequestError(f"request_type: {request.request_type}; this worker takes pictures, no prompts")
        ids = self._prompt_ids(request)
        options, num_ranks = request.options, self.capacity.attention_dp_size
        check_options(options)
        check_trace(request)
        if request.timeout_ms < 0:
            raise RequestError(f"timeout_ms: {request.timeout_ms}; 0 (none) or more")
        if request.dp_rank is not None and not 0 <= request.dp_rank < num_ranks:
            raise RequestError(f"dp_rank: {request.dp_rank}; this worker has ranks 0 to {num_ranks - 1}")
        if options.lora_name and options.lora_name not in self.capacity.lora_names:
            known = ", ".join(self.capacity.lora_names) or "none, leave it out"
            raise RequestError(f"lora_name: no adapter {options.lora_name[:100]!r}; this worker has {known}")
        pictures = self._open_pictures(request, ids[: len(ids) - request.num_resumed])
        self._check_prediction(request.prediction)
        check_sampling(request.sampling, self.capacity.vocab_size, self.limits)
        sampling = self._resolve_lengths(request, len(ids) - request.num_resumed)
        self._check_type(request)
        digest = ""
        if request.request_type != "context_and_generation":
            media = identity_of(pictures)
            digest = disagg.prompt_digest(request.prompt, options.cache_salt, options.lora_name, media)
        params = self._open_params(request.disaggregated_params, len(ids), digest)
        request = msgspec.structs.replace(request, sampling=sampling)
        return AdmittedRequest(request, ids, params, pictures, digest, is_canary(options.cache_salt))

    def admit_texts(self, request: EmbedRequest) -> AdmittedTexts:
        """Raises RequestError."""
        size = self.capacity.embedding_size
        if not size:
            raise RequestError("prompts: this worker makes no embeddings, send them to an embedding worker")
        _check_count("input", len(request.prompts), self.limits.max_embedding_inputs, "limits.max_embedding_inputs")
        if not request.prompts:
            raise RequestError("input: empty; send at least one text")
        if not 0 <= request.dimensions <= size:
            raise RequestError(f"dimensions: {request.dimensions}; this model has 1 to {size}")
        if request.timeout_ms < 0:
            raise RequestError(f"timeout_ms: {request.timeout_ms}; 0 (none) or more")
        texts = tuple(self._text_ids(f"input[{at}]", prompt) for at, prompt in enumerate(request.prompts))
        return AdmittedTexts(texts, request.dimensions or size, request.timeout_ms, is_canary(request.canary))

    def _text_ids(self, name: str, prompt: bytes) -> npt.NDArray[np.int32]:
        if not prompt or len(prompt) % 4:
            raise RequestError(f"{name}: {len(prompt)} bytes of int32 ids; send at least one id")
        ids = np.frombuffer(prompt, "<i4")
        check_text_tokens(name, len(ids), self.limits, self.capacity.max_seq_len)
        if ids.view("<u4").max() >= self.capacity.vocab_size:  # in which negative ids are the largest
            wrong = ids[np.argmax(ids.view("<u4"))]
            raise RequestError(f"{name}: token id {wrong}; ids of this model are 0 to {self.capacity.vocab_size - 1}")
        return ids

    def check_encode(self, timeout_ms: int = 0) -> None:
        """Raises RequestError."""
        if not self.capacity.encodes_images:
            raise RequestError("images: this worker has no vision tower, send them to the encoder")
        if timeout_ms < 0:
            raise RequestError(f"timeout_ms: {timeout_ms}; 0 (none) or more")

    def _prompt_ids(self, request: EngineRequest) -> npt.NDArray[np.int32]:
        if len(request.prompt) % 4:
            raise RequestError(f"prompt: {len(request.prompt)} bytes; int32 ids take a multiple of 4")
        ids = np.frombuffer(request.prompt, "<i4")
        if not 0 <= request.num_resumed <= len(ids):
            raise RequestError(f"num_resumed: {request.num_resumed}; the prompt has {len(ids)} tokens")
        num_own = len(ids) - request.num_resumed
        if not num_own:
            raise RequestError("prompt: no tokens; send at least one")
        self._check_length(len(ids), num_own)
        unsigned = ids.view("<u4")  # in which negative ids are the largest
        if unsigned.max() >= self.capacity.vocab_size:
            at = int(np.argmax(unsigned >= self.capacity.vocab_size))
            raise RequestError(
                f"prompt: token id {ids[at]} at position {at};"
                f" ids of this model are 0 to {self.capacity.vocab_size - 1}"
            )
        return ids

    def _check_prediction(self, prediction: bytes) -> None:
        """Its ids go through the model as drafts."""
        if not prediction:
            return
        if len(prediction) % 4:
            raise RequestError(f"prediction: {len(prediction)} bytes; int32 ids take a multiple of 4")
        ids, most = np.frombuffer(prediction, "<u4"), self.capacity.max_seq_len
        if len(ids) > most:
            raise RequestError(f"prediction: {len(ids)} tokens; no answer has more than max_seq_len, {most}; cut it")
        if ids.max() >= self.capacity.vocab_size:
            wrong, last = int(ids.view("<i4")[int(ids.argmax())]), self.capacity.vocab_size - 1
            raise RequestError(f"prediction: token id {wrong}; ids of this model are 0 to {last}")

    def _check_length(self, num_prompt: int, num_own: int) -> None:
        context = self.capacity.max_seq_len
        if num_prompt >= context:
            raise RequestError(
                f"prompt: {num_prompt} tokens; this worker takes {context - 1} (a context of {context},"
                " less one to generate); shorten the prompt, or raise max_seq_len and kv_cache_config.max_tokens"
            )
        for name, limit in (
            ("limits.max_prompt_tokens", self.limits.max_prompt_tokens),
            ("max_input_len", self.max_input_len),
        ):
            if limit is not None and num_own > limit:
                raise RequestError(f"prompt: {num_own} tokens; {name} is {limit}; shorten the prompt or raise it")

    def _open_pictures(self, request: EngineRequest, prompt: npt.NDArray[np.int32]) -> tuple[OpenedItem, ...]:
        """Checked against the prompt, with their handles opened."""
        placeholder = self.capacity.image_token_id
        if placeholder is None:
            if request.multimodal is not None:
                raise RequestError("multimodal: this worker's model takes text only; leave it out")
            return ()
        items = open_multimodal(request.multimodal, self.key) if request.multimodal is not None else ()
        _check_places(items, prompt == placeholder)
        if request.request_type != "generation_only" and any(item.handle is None for item in items):
            raise RequestError(
                "multimodal: a picture without handle; only generation_only, whose KV comes from prefill, has none"
            )
        return items

    def _resolve_lengths(self, request: EngineRequest, num_prompt: int) -> SamplingParams:
        asked, limit = request.sampling.max_tokens, self.limits.max_tokens
        if asked is not None and limit is not None and asked > limit:
            raise RequestError(f"max_tokens: {asked}; limits.max_tokens is {limit}; ask for less or raise it")
        left = self.capacity.max_seq_len - num_prompt
        granted = min(value for value in (asked, limit, left) if value is not None)
        if granted <= request.num_resumed:
            raise RequestError(
                f"num_resumed: {request.num_resumed}; max_tokens {granted} counts them, so nothing is left to generate"
            )
        if (min_tokens := request.sampling.min_tokens) is not None:
            if asked is not None and min_tokens > asked:
                raise RequestError(f"min_tokens: {min_tokens}; max_tokens is {asked}; lower it")
            min_tokens = min(min_tokens, granted)
        return msgspec.structs.replace(request.sampling, max_tokens=granted, min_tokens=min_tokens)

    def _open_params(self, blob: bytes | None, num_tokens: int, digest: str) -> disagg.DisaggregatedParams | None:
        if blob is None:
            return None
        params = disagg.unseal(blob, self.key)
        if params.request_type != "generation_only":
            raise RequestError(f"disaggregated_params: made for {params.request_type}, not for generation_only")
        if params.num_tokens != num_tokens or params.prompt_digest != digest:
            raise RequestError(
                "disaggregated_params: they belong to another prompt, cache_salt or lora_name;"
                " send what prefill was sent"
            )
        _check_ids("disaggregated_params.first_gen_tokens", params.first_gen_tokens, self.capacity.vocab_size)
        return params

    def _check_type(self, request: EngineRequest) -> None:
        kind, has_params = request.request_type, request.disaggregated_params is not None
        if (kind == "generation_only") != has_params:
            text = "needs disaggregated_params" if kind == "generation_only" else "takes no disaggregated_params"
            raise RequestError(f"request_type: {kind} {text}; they go with generation_only")
        if kind != "context_and_generation" and not self.has_transfer:
            raise RequestError(
                f"request_type: {kind}, but this worker moves no KV; set cache_transceiver_config.backend"
                " (DEFAULT) or send context_and_generation"
            )
        if self.stage == "prefill" and kind != "context_only":
            raise RequestError(f"request_type: {kind}; a prefill worker serves context_only, send it to decode")
        if self.stage == "decode" and kind == "context_only":
            raise RequestError("request_type: context_only; send it to a prefill worker")


def check_open(worker: str, is_draining: bool, num_waiting: int = 0, limit: int = 1, num_places: int = 0) -> None:
    """For engines: raises UnavailableError, or ResourceExhaustedError where too many wait.

    `num_places`: of the batch; who finds one does not wait.
    """
    if is_draining:
        raise UnavailableError(f"{worker} is draining; send it to another worker, or try again")
    if num_waiting >= limit + num_places:
        raise ResourceExhaustedError(
            f"queue: {num_waiting} requests wait; scheduler_config.max_queue_size is {limit}; try again later"
        )


def _check_places(items: tuple[OpenedItem, ...], is_placeholder: npt.NDArray[np.bool_]) -> None:
    """Every picture stands on placeholders, and every placeholder belongs to one."""
    at = 0
    for item in items:
        last = item.position + item.num_tokens
        if item.position < at or last > len(is_placeholder) or not is_placeholder[item.position : last].all():
            raise RequestError(
                f"multimodal: {item.num_tokens} tokens at {item.position}; the prompt has no placeholders there,"
                " expand each picture's placeholder to its number of tokens"
            )
        at = last
    num_places, num_tokens = int(is_placeholder.sum()), sum(item.num_tokens for item in items)
    if num_places != num_tokens:
        raise RequestError(
            f"prompt: {num_places} placeholders of pictures, multimodal has {num_tokens};"
            " send pictures as content parts of a chat"
        )


def check_trace(request: EngineRequest) -> None:
    if request.traceparent and parse_traceparent(request.traceparent) is None:
        raise RequestError(f"traceparent: {request.traceparent[:80]!r}; send W3C's, version 00, or leave it out")
    if len(request.tracestate) > MAX_TRACESTATE_CHARACTERS:
        raise RequestError(
            f"tracestate: {len(request.tracestate)} characters; the limit is {MAX_TRACESTATE_CHARACTERS}, shorten it"
        )


def check_sampling(params: SamplingParams, vocab_size: int, limits: Limits) -> None:
    """Raises RequestError naming value and limit."""
    if params.n != 1:
        raise RequestError(f"n: {params.n}; an engine runs one sequence a request, the entry expands n")
    for name, row in _RANGED:
        if (value := getattr(params, name)) is None:
            continue
        if row.data_type == "FP32":
            _check_number(row, value)
        else:  # limits.max_tokens is checked where lengths are resolved
            _check_integer(row, value, getattr(limits, row.limit) if row.limit == "max_logprobs" else row.high)
    if params.guided_decoding is not None:
        parse_guide(params.guided_decoding, limits)
    _check_count(
        "logits_processors", len(params.logits_processors), limits.max_logits_processors, "limits.max_logits_processors"
    )
    _check_stops(params, vocab_size, limits)
    _check_bias(params, vocab_size, limits)


def _check_stops(params: SamplingParams, vocab_size: int, limits: Limits) -> None:
    _check_count("stop", len(params.stop), limits.max_stop_strings, "limits.max_stop_strings")
    _check_count("stop_token_ids", len(params.stop_token_ids), limits.max_stop_token_ids, "limits.max_stop_token_ids")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.end_id is not None:
        if params.end_id == -1:
            raise RequestError("end_id: -1; to generate past the end, set ignore_eos")
        _check_ids("end_id", (params.end_id,), vocab_size)


def _check_bias(params: SamplingParams, vocab_size: int, limits: Limits) -> None:
    _check_count("bad_token_ids", len(params.bad_token_ids), limits.max_bad_words, "limits.max_bad_words")
    for sequence in params.bad_token_ids:
        if not sequence:
            raise RequestError("bad_token_ids: an empty sequence; leave it out")
        _check_ids("bad_token_ids", sequence, vocab_size)
    _check_count("logit_bias", len(params.logit_bias), limits.max_logit_bias, "limits.max_logit_bias")
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for bias in params.logit_bias.values():
        if not -_ANY <= bias <= _ANY:  # not the table's range: biases of words that share a token add up
            raise RequestError(f"logit_bias: {bias}; a finite number of at most {_ANY:g} is needed")


def _check_integer(row: Parameter, value: int, high: float) -> None:
    if not row.low <= value <= high:
        bounds = f"{row.low} or more" if math.isinf(high) else f"{row.low} to {high}"
        raise RequestError(f"{row.name}: {value}; {bounds}{'' if row.off is None else f'; {row.off} turns it off'}")


def _check_number(row: Parameter, value: float) -> None:
    if not math.isfinite(value):
        raise RequestError(f"{row.name}: {value}; a finite number is needed")
    if not row.low <= value <= min(row.high, _ANY):
        raise RequestError(f"{row.name}: {value}; {row.low:g} to {min(row.high, _ANY):g}")
    if row.is_low_open and value == row.low:
        raise RequestError(f"{row.name}: {value:g}; more than {row.low:g}, {row.off:g} turns it off")


def _check_count(name: str, count: int, limit: int, key: str) -> None:
    if count > limit:
        raise RequestError(f"{name}: {count} entries; {key} is {limit}; send fewer or raise it")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{name}: token id {token}; ids of this model are 0 to {vocab_size - 1}")
