"""The tensors of every Triton model: the only place that spells them.

Each `ModelSpec` is used three times: Triton gets it from the launch, else by `auto_complete_config`; the stage reads
its inputs by it; and tests compare ensembles and responses with it. Sampling names are those of tensorrtllm_backend's
ensemble; `sampling_parameters`, `exclude_input_in_output` and the `return_*` flags are vllm_backend's, so that clients
of both work unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bireme.parameters import PARAMETERS

Kind = Literal["value", "bytes", "array"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    data_type: str  # without Triton's TYPE_ prefix: BOOL, UINT8, INT32, INT64, UINT32, UINT64, FP16, FP32, BYTES
    dims: tuple[int, ...]  # -1 varies
    optional: bool = False
    # what a stage gets of an input: a number, flag or text, or a list of them; BYTES that need not be text; numpy's own
    kind: Kind = "value"

    @property
    def triton_type(self) -> str:
        return "TYPE_STRING" if self.data_type == "BYTES" else f"TYPE_{self.data_type}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    decoupled: bool = False
    max_batch_size: int = 0  # above 0: tensors have one more dimension, before those of their specs
    _inputs: dict[str, TensorSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_inputs", {tensor.name: tensor for tensor in self.inputs})

    def input(self, name: str) -> TensorSpec | None:
        return self._inputs.get(name)


def _in(name: str, data_type: str, dims: tuple[int, ...] = (1,), kind: Kind = "value") -> TensorSpec:
    return TensorSpec(name, data_type, dims, optional=True, kind=kind)


def _out(name: str, data_type: str, dims: tuple[int, ...] = (1,)) -> TensorSpec:
    return TensorSpec(name, data_type, dims)


# HTTP does not notice a missing required input, so every input is optional here and the stages check.
SAMPLING = tuple(
    _in(name, parameter.data_type, (-1,) if parameter.is_list else (1,))
    for parameter in PARAMETERS
    for name in parameter.tensor_names
)

_REQUEST = (
    _in("multimodal", "BYTES", kind="bytes"),
    _in("lora_name", "BYTES"),
    _in("cache_salt", "BYTES"),
    _in("kv_cache_retention_config", "BYTES"),  # JSON of serving_options.KvCacheRetentionConfig
    _in("request_id", "BYTES"),
    _in("abort", "BOOL"),
    _in("ping", "BOOL"),
)
# msgpack Submit, Encode or Release, from pipelines: instead of all the others
_ENGINE_REQUEST = _in("engine_request", "UINT8", (-1,), "array")
# Answers a ping: ready. The error UNAVAILABLE says what else; NOT_FOUND that there is no request of the `request_id`.
_STATE = _out("state", "BYTES")

TOKENIZER = ModelSpec(
    "tokenizer",
    inputs=(
        _in("text_input", "BYTES"),
        _in("messages", "BYTES"),
        _in("tools", "BYTES"),
        _in("chat_template_kwargs", "BYTES"),
    ),
    outputs=(_out("input_ids", "INT32", (-1,)), _out("prompt", "BYTES")),
)

PREFILL = ModelSpec(
    "prefill",
    inputs=(
        _in("input_ids", "INT32", (-1,), "array"),
        *SAMPLING,
        *_REQUEST,
        _in("resumed_output_ids", "INT32", (-1,), "array"),
        _ENGINE_REQUEST,
    ),
    outputs=(
        _out("disaggregated_params", "BYTES"),
        _out("output_ids", "INT32", (-1,)),
        _out("prompt_log_probs", "BYTES"),
        _out("usage", "BYTES"),
        _out("embedding_handles", "BYTES"),  # of an encode, where this worker has the vision tower
        _out("spans", "BYTES"),  # msgpack of messages.EngineSpan, for a pipeline that traces its request
        _STATE,
    ),
)

DECODE = ModelSpec(
    "decode",
    inputs=(
        _in("input_ids", "INT32", (-1,), "array"),
        *SAMPLING,
        *_REQUEST,
        _in("disaggregated_params", "BYTES", kind="bytes"),
        _in("resumed_output_ids", "INT32", (-1,), "array"),
        # the token bus
        _in("subscribe", "BYTES", kind="bytes"),
        _in("consumer", "BYTES", kind="bytes"),
        _in("commands", "UINT8", (-1,), "array"),
    ),
    outputs=(
        _out("output_ids", "INT32", (-1,)),
        _out("text_output", "BYTES"),
        _out("log_probs", "FP32", (-1,)),
        _out("top_log_probs", "BYTES"),
        _out("prompt_log_probs", "BYTES"),
        _out("finish_reason", "BYTES"),
        _out("usage", "BYTES"),
        _out("index", "INT32"),
        _out("steps", "UINT8", (-1,)),
        _STATE,
    ),
    decoupled=True,
)

MULTIMODAL_ENCODER = ModelSpec(
    "multimodal_encoder",
    inputs=(
        _in("images", "BYTES", (-1,), "bytes"),
        _in("embeddings", "BYTES", kind="bytes"),
        _in("return_embeddings", "BOOL"),
        _in("request_id", "BYTES"),
        _in("abort", "BOOL"),
        _in("ping", "BOOL"),
        _ENGINE_REQUEST,
    ),
    outputs=(
        _out("embedding_handles", "BYTES"),
        _out("embeddings", "BYTES"),
        _out("shapes", "INT32", (-1, 2)),
        _out("hashes", "BYTES", (-1,)),
        _STATE,
    ),
)

EMBEDDING = ModelSpec(
    "embedding",
    inputs=(
        _in("text_input", "BYTES", (-1,)),
        _in("input_ids", "INT32", (-1,), "array"),  # of all texts, one after the other
        _in("input_lengths", "INT32", (-1,)),  # tokens of each text; needed for more than one
        _in("prompt_name", "BYTES"),
        _in("dimensions", "INT32"),
        _in("request_id", "BYTES"),
        _in("abort", "BOOL"),
        _in("ping", "BOOL"),
        _ENGINE_REQUEST,
    ),
    outputs=(
        _out("embedding", "FP32", (-1, -1)),  # a row a text
        _out("num_tokens", "INT32", (-1,)),
        _STATE,
    ),
)

# Triton fixes the rank of a tensor: one row of logits is [1, vocab].
LOGITS_PROCESSOR = ModelSpec(
    "logits_processor",
    inputs=(
        _in("input_ids", "INT32", (-1,), "array"),  # histories of all rows, one after the other
        _in("input_lengths", "INT32", (-1,)),  # tokens of each row's history; needed for more than one row
        _in("num_prompt_tokens", "INT32", (-1,)),  # of each history: how many are the prompt; default 0
        _in("end_id", "INT32", (-1,)),  # end-of-sequence ids; default: the model's
        _in("logits", "FP32", (-1, -1)),
        _in("processors", "BYTES"),
    ),
    outputs=(_out("logits", "FP32", (-1, -1)),),
)

VIDEO_DIFFUSION = ModelSpec(
    "video_diffusion",
    inputs=(
        _in("prompt", "BYTES"),
        _in("negative_prompt", "BYTES"),
        _in("size", "BYTES"),
        _in("seconds", "FP32"),
        _in("num_frames", "INT32"),
        _in("fps", "INT32"),
        _in("num_inference_steps", "INT32"),
        _in("guidance_scale", "FP32"),
        _in("seed", "UINT64"),
        _in("num_images", "INT32"),  # pictures instead of a video
        _in("output_format", "BYTES"),
        _in("request_id", "BYTES"),
        _in("abort", "BOOL"),
    ),
    outputs=(
        _out("queue_position", "INT32"),  # requests before this one; 0: it runs
        _out("progress", "FP32"),  # 0 to 1
        _out("step", "INT32"),
        _out("total_steps", "INT32"),
        _out("eta_s", "FP32"),  # -1: not known yet
        _out("details", "BYTES"),  # JSON, on acceptance and with the result: what is made
        _out("video", "BYTES"),
        _out("images", "BYTES", (-1,)),
        _out("frames", "UINT8", (-1, -1, -1, 3)),
        _out("inference_time_s", "FP32"),
    ),
    decoupled=True,
)

_TEXT_IN = (
    _in("text_input", "BYTES"),
    _in("input_ids", "INT32", (-1,), "array"),
    *SAMPLING,
    _in("sampling_parameters", "BYTES"),
    _in("exclude_input_in_output", "BOOL"),
    _in("return_finish_reason", "BOOL"),
    _in("return_cumulative_logprob", "BOOL"),
    _in("return_logprobs", "BOOL"),
    _in("return_num_input_tokens", "BOOL"),
    _in("return_num_output_tokens", "BOOL"),
    _in("return_perf_metrics", "BOOL"),
    _in("lora_name", "BYTES"),
    _in("cache_salt", "BYTES"),
    _in("session_id", "BYTES"),
    _in("routing", "BYTES"),  # JSON of serving_options.RoutingChoice
    _in("kv_cache_retention_config", "BYTES"),
)

# Where n > 1 answers come in one response: one element a sequence; output_ids and log_probs of all
# sequences one after the other, which num_output_tokens tells apart.
_TEXT_OUT = (
    _out("text_output", "BYTES", (-1,)),
    _out("output_ids", "INT32", (-1,)),
    _out("log_probs", "FP32", (-1,)),
    _out("top_log_probs", "BYTES", (-1,)),
    _out("prompt_log_probs", "BYTES", (-1,)),
    _out("finish_reason", "BYTES", (-1,)),
    _out("usage", "BYTES", (-1,)),
    _out("index", "INT32", (-1,)),
    # the peers' names, present when asked for
    _out("output_log_probs", "FP32", (-1,)),
    _out("cum_log_probs", "FP32", (-1,)),
    _out("cumulative_logprob", "FP32", (-1,)),
    _out("logprobs", "BYTES", (-1,)),
    _out("sequence_index", "INT32", (-1,)),
    _out("num_input_tokens", "UINT32"),
    _out("num_output_tokens", "UINT32", (-1,)),
    # with the end of each sequence; a rate of nothing drafted is 0
    _out("acceptance_rate", "FP32", (-1,)),
    _out("total_accepted_draft_tokens", "INT32", (-1,)),
    _out("total_draft_tokens", "INT32", (-1,)),
)

GENERATE = ModelSpec("generate", inputs=(*_TEXT_IN, _in("stream", "BOOL")), outputs=_TEXT_OUT, decoupled=True)
COMPLETION = ModelSpec("completion", inputs=_TEXT_IN, outputs=_TEXT_OUT)
CHAT = ModelSpec("chat", inputs=(_in("request", "BYTES"),), outputs=(_out("response", "BYTES"),), decoupled=True)
VIDEO = ModelSpec("video", inputs=(_in("request", "BYTES"),), outputs=(_out("response", "BYTES"),), decoupled=True)

ROUTER = ModelSpec(
    "router",
    inputs=(
        _in("text_input", "BYTES"),
        _in("input_ids", "INT32", (-1,), "array"),
        _in("lora_name", "BYTES"),
        _in("cache_salt", "BYTES"),
        _in("priority", "FP32"),
        _in("session_id", "BYTES"),
        _in("routing", "BYTES"),
    ),
    outputs=(
        _out("prefill_worker", "BYTES"),  # "": decode computes the prompt
        _out("decode_worker", "BYTES"),
        _out("prefill_dp_rank", "INT32"),  # -1: the engine has one, or chooses
        _out("decode_dp_rank", "INT32"),
        _out("overlap_tokens", "INT32"),  # of the prompt, that the worker that computes it holds
        _out("workers", "BYTES", (-1,)),  # all candidates, those of prefill first
        _out("overlaps", "INT32", (-1,)),
        _out("costs", "FP32", (-1,)),  # in KV blocks
        _out("placement", "BYTES"),  # all of this and each candidate's load, as JSON
    ),
)

# tensorrtllm_backend's, by name, type and shape. What can't be served is an input all the same: its refusal can then
# say what to do, while Triton's own (of an input that a model has not) says nothing.
_TRTLLM_BACKEND_SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "random_seed", "seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "length_penalty", "stop_words", "bad_words", "embedding_bias_words",
    "embedding_bias_weights", "end_id", "pad_id", "num_return_sequences", "beam_width", "return_log_probs",
    "guided_decoding_guide_type", "guided_decoding_guide",
)  # fmt: skip
_TRTLLM_BACKEND_IN = (
    _in("text_input", "BYTES"),
    *(tensor for tensor in SAMPLING if tensor.name in _TRTLLM_BACKEND_SAMPLING),
    _in("min_length", "INT32"),  # min_tokens of older clients
    _in("exclude_input_in_output", "BOOL"),
    _in("stream", "BOOL"),
    _in("return_num_input_tokens", "BOOL"),
    _in("return_num_output_tokens", "BOOL"),
    _in("return_context_logits", "BOOL"),
    _in("return_generation_logits", "BOOL"),
    _in("return_perf_metrics", "BOOL"),
    _in("decoder_text_input", "BYTES"),
    _in("image_input", "FP16", (-1, 3, -1, -1)),
    _in("image_bytes_input", "UINT8", (-1, -1, -1, -1)),
    _in("image_url_input", "BYTES"),
    _in("video_bytes_input", "UINT8", (-1, -1, -1, -1)),
    _in("prompt_embedding_table", "FP16", (-1, -1)),
    _in("prompt_vocab_size", "INT32"),
    _in("prompt_table_extra_id", "UINT64"),
    _in("num_draft_tokens", "INT32"),
    _in("use_draft_logits", "BOOL"),
    _in("lora_task_id", "UINT64"),
    _in("lora_weights", "FP16", (-1, -1)),
    _in("lora_config", "INT32", (-1, 3)),
)
_TRTLLM_BACKEND_OUT = (
    _out("text_output", "BYTES", (-1,)),
    _out("batch_index", "INT32"),
    _out("sequence_index", "INT32"),
    _out("cum_log_probs", "FP32", (-1,)),
    _out("output_log_probs", "FP32", (-1, -1)),
    _out("num_input_tokens", "INT32"),
    _out("num_output_tokens", "INT32"),
    # with the end of each sequence
    _out("acceptance_rate", "FP32"),
    _out("total_accepted_draft_tokens", "INT32"),
    _out("total_draft_tokens", "INT32"),
    # never sent: a client that lists one as an output gets an error that names the input to set
    _out("context_logits", "FP32", (-1, -1)),
    _out("generation_logits", "FP32", (-1, -1, -1)),
    *(_out(f"kv_cache_{name}_blocks", "INT32") for name in ("alloc_new", "reused", "alloc_total")),
    *(_out(f"{name}_time_ns", "INT64") for name in ("arrival", "first_scheduled", "first_token", "last_token")),
)
TENSORRT_LLM_BLS, ENSEMBLE = (
    ModelSpec(name, _TRTLLM_BACKEND_IN, _TRTLLM_BACKEND_OUT, decoupled=True, max_batch_size=64)
    for name in ("tensorrt_llm_bls", "ensemble")
)

STAGES = (TOKENIZER, PREFILL, DECODE, MULTIMODAL_ENCODER, EMBEDDING, LOGITS_PROCESSOR, VIDEO_DIFFUSION)
PIPELINES = (GENERATE, COMPLETION, CHAT, VIDEO, ROUTER, TENSORRT_LLM_BLS, ENSEMBLE)
MODELS = {spec.name: spec for spec in (*STAGES, *PIPELINES)}
