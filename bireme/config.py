"""Recipes and engine settings: what a deployment is made of, as data. They are read by recipe_files.py."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bireme.engine_kinds import ENGINE_KINDS, EngineKind, EngineName
from bireme.errors import ConfigError
from bireme.gguf.folder import is_gguf, model_folder
from bireme.gguf.head import SUFFIX
from bireme.settings import (
    HARMLESS,
    DiscoveryConfig,
    Duration,
    Engines,
    Instances,
    NotNegative,
    Positive,
    PositiveDuration,
    QuantConfig,
    Rule,
    SeqLen,
    Settings,
    SpeculativeConfig,
    Staging,
)

CHECKOUT = Path(__file__).resolve().parents[1]
DEFAULT_RECIPE = CHECKOUT / "recipes" / "tiny"
UNREAD_EVENTS = "KV events are off: nothing reads what this buffer keeps, and they cost time"
UNREAD_EVENTS_REMEDY = "set kv_events.enabled: true in recipe.yaml, or remove it"
_NOT_MOCKER = Engines(mocker=HARMLESS)
_SPEED_ELSEWHERE = Engines(torch=HARMLESS, mocker=HARMLESS)


def _not_torch(reason: str, *accepted: Any) -> Engines:
    return Engines(torch=Rule("refused", reason, accepted), mocker=HARMLESS)


_KV_DTYPES = _not_torch("set auto or fp8, or use engine: trtllm", "float32", "float16", "bfloat16", "fp8")
_ONE_GPU = _not_torch("one GPU per engine; set 1 and use `replicas`, or engine: trtllm")
_LLM_ARGS = Rule(
    "refused", "TensorRT-LLM's arguments stand at the top of an engine YAML; move them there and set engine: trtllm"
)


class KvCacheConfig(Settings, frozen=True, kw_only=True):
    tokens_per_block: Positive = 32
    enable_block_reuse: bool = True
    max_tokens: Positive | None = None  # tokens the pool holds; None: from free_gpu_memory_fraction, or 1 GiB on CPU
    free_gpu_memory_fraction: Annotated[float, msgspec.Meta(gt=0, lt=1), _NOT_MOCKER] = 0.9
    # repeated over the layers; None: the model's own
    max_attention_window: Annotated[tuple[int, ...] | None, _NOT_MOCKER] = None
    # KV events that an engine keeps for its publisher; 0: 100,000 where `kv_events` in recipe.yaml publishes them
    event_buffer_max_size: NotNegative = 0
    dtype: Annotated[str, _KV_DTYPES] = "auto"
    enable_partial_reuse: Annotated[bool, _SPEED_ELSEWHERE] = False
    # Bytes of host memory for blocks that are evicted from the pool; None, 0: none
    host_cache_size: Annotated[NotNegative | None, _NOT_MOCKER] = None
    # Blocks of a lower retention priority are not copied there; None: 35, what a block has if no request says otherwise
    secondary_offload_min_priority: Annotated[Annotated[int, msgspec.Meta(ge=0, le=100)] | None, _NOT_MOCKER] = None
    # Bytes on disk for blocks that are evicted from host memory; None, 0: none. TensorRT-LLM has both keys from 1.3 on
    disk_cache_size: Annotated[NotNegative | None, _NOT_MOCKER] = None
    disk_cache_path: Annotated[str | None, _NOT_MOCKER] = None  # folder for them ($NAME and ~ are expanded)


class SchedulerConfig(Settings, frozen=True, kw_only=True):
    capacity_scheduler_policy: Annotated[
        Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"],
        _not_torch(
            "new requests join a running batch here; set GUARANTEED_NO_EVICT", "GUARANTEED_NO_EVICT", "MAX_UTILIZATION"
        ),
    ] = "GUARANTEED_NO_EVICT"
    max_queue_size: Positive = 1024  # waiting requests; one more is refused with RESOURCE_EXHAUSTED
    max_queue_time_s: Duration = 0.0  # waiting longer ends with DEADLINE_EXCEEDED; 0: no limit
    # Of the time, what requests of priority 0 (batches) get beside others; 1: they rest for others' prompts alone
    best_effort_share: Annotated[
        float,
        msgspec.Meta(gt=0, le=1),
        Engines(
            trtllm=Rule("refused", "TensorRT-LLM lets none rest; set frontend.batches.max_beside_live in recipe.yaml")
        ),
    ] = 0.1
    # A step that running streams take part in takes no more of prompts than lets it end in that time; 0: no bound
    max_stream_gap_ms: Annotated[
        Duration,
        Engines(
            trtllm=Rule("refused", "TensorRT-LLM knows no such bound; remove it, and lower max_num_tokens", (0.0,)),
            mocker=Rule("refused", "the mocker's steps take what `mocker` says; remove it", (0.0,)),
        ),
    ] = 0.0


class CudaGraphConfig(Settings, frozen=True, kw_only=True):
    """Batch sizes whose decode steps are one launch."""

    max_batch_size: Positive | None = None  # None: max_batch_size of the engine, 256 at the most
    batch_sizes: tuple[Positive, ...] | None = None  # None: a few, up to max_batch_size
    enable_padding: bool = True  # a batch between two sizes is filled up; false: it is launched kernel by kernel


class CacheTransceiverConfig(Settings, frozen=True, kw_only=True):
    # DEFAULT: shm on one host; CUDA_IPC: from GPU to GPU of one host
    backend: Annotated[
        Literal["DEFAULT", "SHM", "CUDA_IPC", "NIXL", "UCX", "MPI", "MOONCAKE"] | None,
        Engines(
            trtllm=Rule(
                "refused",
                "TensorRT-LLM moves KV itself, without shm and cuda_ipc; set DEFAULT, NIXL, UCX, MPI or MOONCAKE",
                ("DEFAULT", "NIXL", "UCX", "MPI", "MOONCAKE"),
            )
        ),
    ] = None
    max_tokens_in_buffer: Positive | None = None  # bounded transfer buffer, in tokens; must hold the longest prompt
    kv_transfer_timeout_ms: Positive = 60_000  # a lease nobody claimed is freed after this
    staging: Staging = "auto"  # NIXL's


class GuidedDecodingConfig(Settings, frozen=True, kw_only=True):
    """What compiling and following the guides of guided decoding may cost."""

    compile_timeout_s: PositiveDuration = 10.0  # a guide that takes longer is refused
    max_queue_size: Positive = 64  # guides that wait to be compiled; one more is refused with RESOURCE_EXHAUSTED
    num_processes: Positive = 2  # processes that compile, started when they are needed
    max_compiled_bytes: Positive = 64 << 20  # of one compiled guide
    cache_bytes: Positive = 256 << 20  # of all that are kept
    max_token_ms: PositiveDuration = 500.0  # CPU time for one token's mask; a guide that takes longer ends its request
    any_whitespace: bool = False  # JSON in any layout; false: one line, one space after comma and colon


class MultimodalConfig(Settings, frozen=True, kw_only=True):
    """What encoding pictures may cost; of the engine that has the vision tower, but for the last two."""

    embedding_cache_bytes: NotNegative = 512 << 20  # embeddings kept for pictures that come again; 0: none
    max_batch_images: Positive = 8  # in one pass of the vision tower
    max_concurrent_encodes: Positive = 16  # requests whose pictures are in memory; more wait in the queue
    max_held_bytes: Positive = 2 << 30  # embeddings of requests that wait or run; one more is refused
    embedding_pool_bytes: NotNegative = 0  # of the engine's device, for embeddings on their way; 0: they go by files


class MockerConfig(Settings, frozen=True, kw_only=True):
    """Timing model of the mocker engine. Milliseconds."""

    step_ms: Duration = 5.0  # a decode step
    step_ms_per_request: Duration = 0.0
    prefill_ms: Duration = 0.0  # a prefill, plus
    prefill_ms_per_token: Duration = 0.0
    load_ms: Duration = 0.0
    vocab_size: NotNegative = 0  # 0: the tokenizer's
    max_seq_len: SeqLen = 1 << 20


class EngineConfig(Settings, frozen=True, kw_only=True):
    """Engine YAML, TensorRT-LLM's key names, with the range of each and the engines that do not honor it."""

    max_batch_size: Positive | None = None
    max_num_tokens: Positive | None = None
    max_seq_len: SeqLen | None = None
    max_input_len: Positive | None = None
    dtype: Annotated[str, _NOT_MOCKER] = "auto"
    enable_chunked_prefill: Annotated[bool, _NOT_MOCKER] = True
    trust_remote_code: Annotated[
        bool, _not_torch("no code of a checkpoint is run; remove it, or use engine: trtllm")
    ] = False
    # TensorRT-LLM's attention kernels; torch has one way for each device, takes the key without effect and says so once
    attn_backend: Annotated[str | None, _SPEED_ELSEWHERE] = None
    disable_overlap_scheduler: Annotated[bool, _NOT_MOCKER] = False
    # None: decode steps are launched kernel by kernel
    cuda_graph_config: Annotated[CudaGraphConfig | None, _NOT_MOCKER] = CudaGraphConfig()
    # dummy: random weights of config.json's shape; no weights are read
    load_format: Annotated[
        str, _not_torch("safetensors are read here; set auto, or use engine: trtllm", "auto", "dummy")
    ] = "auto"
    # None: requests with guided_decoding are refused
    guided_decoding_backend: Annotated[
        Literal["xgrammar", "llguidance"] | None,
        _not_torch("compiled with xgrammar here; set xgrammar", None, "xgrammar"),
    ] = "xgrammar"
    quant_config: QuantConfig = QuantConfig()
    speculative_config: SpeculativeConfig | None = SpeculativeConfig()
    tensor_parallel_size: Annotated[int, _ONE_GPU] = 1
    pipeline_parallel_size: Annotated[int, _ONE_GPU] = 1
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    cache_transceiver_config: CacheTransceiverConfig = CacheTransceiverConfig()
    guided_decoding_config: Annotated[GuidedDecodingConfig, Engines(trtllm=HARMLESS, mocker=HARMLESS)] = (
        GuidedDecodingConfig()
    )
    multimodal_config: Annotated[MultimodalConfig, Engines(trtllm=HARMLESS, mocker=HARMLESS)] = MultimodalConfig()
    mocker: Annotated[MockerConfig, Engines(torch=HARMLESS, trtllm=HARMLESS)] = MockerConfig()
    # engine trtllm: the whole YAML, for TensorRT-LLM; load_recipe fills it
    llm_args: Annotated[dict[str, Any], Engines(torch=_LLM_ARGS, mocker=_LLM_ARGS)] = {}


class WorkerEntry(Settings, frozen=True, kw_only=True):
    """One stage's workers."""

    engine: EngineName = "torch"
    engine_config: EngineConfig = EngineConfig()  # in YAML also the name of a file beside recipe.yaml
    engine_args: dict[str, Any] = {}  # merged over engine_config, block by block; empty once the recipe is loaded
    engine_version: str = ""  # of TensorRT-LLM, that engine_config is written for: 1.2 or 1.3; "": both
    model: str = ""  # folder or hub id of this worker's own model; "": the recipe's
    replicas: int = 1
    num_threads: Positive | None = None  # CPU threads an engine process; None: an equal share of the cores
    devices: tuple[NotNegative, ...] = ()  # GPUs: CUDA_VISIBLE_DEVICES of the engine process; empty: all
    env: dict[str, str] = {}

    @property
    def kind(self) -> EngineKind:
        return ENGINE_KINDS[self.engine]


class Limits(Settings, frozen=True, kw_only=True):
    """Upper bounds of a request; exceeding one is INVALID_ARGUMENT naming value and limit."""

    max_prompt_bytes: Positive = 8 << 20
    max_prompt_tokens: Positive | None = None  # None: the engine's
    max_tokens: Positive | None = None  # None: what is left of the context
    max_n: Positive = 16
    max_stop_strings: NotNegative = 16
    max_stop_string_bytes: Positive = 1024
    max_stop_token_ids: NotNegative = 256
    max_logprobs: NotNegative = 20
    max_bad_words: NotNegative = 128
    max_logit_bias: NotNegative = 1024
    max_guide_depth: Positive = 64  # nesting of a guide's JSON
    max_guide_choices: Positive = 1024
    max_stream_buffer_bytes: Positive = 4 << 20  # a slow reader's unsent responses; above it the request is cancelled
    max_bus_buffer_bytes: Positive = 64 << 20  # a slow bus consumer's unsent steps; above it the subscription ends
    max_concurrent_requests: Positive = 4096  # of a process of a pipeline or frontend; RESOURCE_EXHAUSTED above
    max_messages: Positive = 2048  # of one chat request
    max_tools: NotNegative = 128
    max_guide_bytes: Positive = 256 << 10  # JSON schema, grammar or regex of one request
    max_prompts: Positive = 64  # of one completion request
    max_embedding_inputs: Positive = 2048  # texts of one request for embeddings
    max_logits_bytes: Positive = 256 << 20  # of one logits_processor request
    max_logits_processors: NotNegative = 8  # of one request, for tokens or to the model logits_processor
    max_processor_ms: PositiveDuration = 500.0  # CPU time of a request's processors for one token; more ends it


class MediaLimits(Settings, frozen=True, kw_only=True):
    """Where pictures of a request may come from, and how large they may be."""

    max_images: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 16  # of one request
    max_url_characters: Positive = 8192  # of an http(s) URL; data: URLs have max_image_bytes
    max_image_bytes: Positive = 50 << 20  # of one picture, encoded
    max_request_bytes: Positive = 200 << 20  # of all pictures of one request, encoded
    max_pixels: Annotated[int, msgspec.Meta(ge=1, le=89_478_485)] = 40_000_000  # checked before decoding
    max_request_pixels: Positive = 100_000_000  # of all pictures of one request; each is checked before it is decoded
    max_aspect_ratio: PositiveDuration = 200.0  # longer side to shorter side
    timeout_s: PositiveDuration = 10.0  # from the first look-up to the last byte, redirects included
    max_redirects: NotNegative = 5
    max_concurrent_fetches: Positive = 16  # of one process; more wait
    allow_http: bool = True  # false: https only
    allowed_domains: tuple[str, ...] = ()  # example.com, or .example.com for all below; empty: any public host
    allowed_local_media_path: str = ""  # folder (absolute) that file: URLs may read; "": none


class PipelineInstances(Settings, frozen=True, kw_only=True):
    """Stub processes of each text pipeline; Triton hands a request to one that is free."""

    generate: Instances = 1
    chat: Instances = 1
    completion: Instances = 1


class PipelineConfig(Settings, frozen=True, kw_only=True):
    migration_limit: NotNegative = 3  # times that one stream may move to another engine or engine life
    stall_timeout_s: PositiveDuration = 30.0  # no news from a worker for so long ends the stream with UNAVAILABLE
    # prefill computes every prompt, short ones too; no prefill worker: refuse instead of serving aggregated
    enforce_disaggregation: bool = False
    request_timeout_s: Duration = 0.0  # default deadline; 0: none
    instances: PipelineInstances = PipelineInstances()
    tensorrtllm_backend_models: bool = False  # load tensorrt_llm_bls and ensemble, for that backend's own clients


RoutingMode = Literal["kv", "round_robin", "random", "least_loaded", "power_of_two", "direct"]
ROUTED_STAGES = ("prefill", "decode")


class BusyRule(Settings, frozen=True, kw_only=True):
    """When a worker takes no more requests of a priority; at least one bound must be set."""

    up_to_priority: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # the rule is for requests of this and lower
    max_kv_usage: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None  # share of its KV blocks in use
    max_waiting_tokens: Positive | None = None  # prompt tokens that it has not computed yet


class RouterConfig(Settings, frozen=True, kw_only=True):
    """Which workers serve a request: docs/routing.md."""

    mode: RoutingMode | None = None  # None: kv where a stage has more than one worker, else round_robin
    prefill_weight: Duration = 1.0  # price of a KV block that must be computed
    # Price of a block that it must compute before: that delays this request, computing one again also later ones.
    waiting_weight: Duration = 0.5
    # Price of a KV block that running requests use. More costs hits and balances no better (docs/measurements.md).
    decode_weight: Duration = 0.1
    # A new block is so much dearer where a pool turns over twice as fast as the mean, cheaper where it stands still
    turnover_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.8
    host_credit: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.75  # share of a block's price that host memory saves
    disk_credit: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25  # the same of a block on disk
    temperature: Duration = 0.0  # of the softmax over costs; 0: the lowest cost
    predicted_ttl_s: PositiveDuration = 5.0  # a placed prompt's blocks count as held, without their event
    approximate_ttl_s: PositiveDuration = 120.0  # the same for workers that send no KV events
    session_ttl_s: PositiveDuration = 300.0  # a session stays with its worker until it has been silent for so long
    max_sessions: Positive = 65_536  # of one router; above it the one silent longest is forgotten
    busy: tuple[BusyRule, ...] = ()  # when all workers are busy, a request is refused with RESOURCE_EXHAUSTED
    # A prompt is computed by decode itself where that costs less than the transfer would. Until engines have measured:
    prefill_ms_per_token: Duration = 0.03  # of decode's time, for a prompt token that it computes
    transfer_ms: Duration = 4.0  # a hop over prefill and a transfer of any size; 0: every prompt is transferred
    transfer_ms_per_token: Duration = 0.002
    has_model: bool = False  # load the Triton model `router`, for gateways that place requests themselves


class KvEventsConfig(Settings, frozen=True, kw_only=True):
    """How engines tell routers what they hold and how busy they are: docs/kv_events.md."""

    enabled: bool | None = None  # KV events; None: where routers ask for them. Load is told wherever routers ask for it
    plane: Literal["zmq", "nats", "jetstream"] = "zmq"  # what carries events and load
    host: str = ""  # zmq: address that engines bind and others reach, 127.0.0.1; "": Unix sockets in the run folder
    nats_url: str = ""  # nats and jetstream: nats://host:4222 or tls://..., with user:password@ ($NAME is expanded)
    nats_credentials: str = ""  # file that NATS calls a creds file ($NAME is expanded); "": none
    nats_prefix: Annotated[str, msgspec.Meta(pattern=r"^[\w-]+(\.[\w-]+)*$")] = "bireme"  # of all subjects
    replay_batches: Positive = 10_000  # sent batches that an engine keeps for readers that missed some, 64 MiB at most
    # A record of each engine step: what it computed, what waited, how long it took (docs/observability.md)
    step_records: bool = False


class ChatConfig(Settings, frozen=True, kw_only=True):
    """How the model's chat answers read."""

    reasoning_parser: str = ""  # a format of bireme/text/parsers; "": reasoning is not told apart
    # of chat completions' fields that hold it; reasoning is vLLM's and OpenRouter's name for the same
    reasoning_names: Annotated[tuple[Literal["reasoning_content", "reasoning"], ...], msgspec.Meta(min_length=1)] = (
        "reasoning_content",
    )
    tool_parser: str = ""  # a format of bireme/text/parsers; "": requests with tools are refused
    # with tool_choice auto, what the token begins that calls begin with is a call, its arguments by their schema;
    # null: where format, tokenizer and engine allow it, as the log says
    structural_tags: bool | None = None
    drop_hosted_tools: bool = False  # leave out what OpenAI or Anthropic would run (web search), else it is refused
    template_kwargs: dict[str, Any] = {}  # the chat template's variables, weaker than the request's
    # of messages whose control tokens count (developer is system); in all others they are text: docs/openai.md
    trusted_roles: tuple[Literal["system", "user", "assistant", "tool"], ...] = ()
    template: str = ""  # Jinja file in place of the model's own (relative to the recipe; $NAME and ~ are expanded)


class StoredResponsesConfig(Settings, frozen=True, kw_only=True):
    """What /v1/responses keeps, for each API key."""

    folder: str = ""  # of the database; "": the launch's run folder, and it goes with the launch
    max_responses: NotNegative = 10_000  # above it the longest unused ones are removed; 0: nothing is kept
    max_bytes: Positive = 1 << 30  # of requests and answers; as above
    max_age_s: Positive = 30 * 24 * 3600  # since they were made or gone on from
    max_background: Positive = 256  # unfinished ones; more are refused


class FilesConfig(Settings, frozen=True, kw_only=True):
    """What /v1/files keeps, for each API key."""

    folder: str = ""  # of the files, and of batches; "": the launch's run folder, and they go with the launch
    max_file_bytes: Positive = 512 << 20
    max_files: NotNegative = 1000  # uploaded ones; more are refused. 0: there are neither files nor batches
    max_bytes: Positive = 4 << 30  # of the uploaded ones together; also of a batch's results
    max_age_s: Positive = 30 * 24 * 3600  # files and ended batches are removed after this


class BatchesConfig(Settings, frozen=True, kw_only=True):
    """How /v1/batches runs them."""

    max_lines: Positive = 50_000  # of a batch's input
    max_unfinished: Positive = 16  # batches of an API key; more are refused
    max_concurrency: Positive = 16  # lines under way in a process of the frontend
    # Lines that are begun beside other requests, and in the second after them. None: as many as without where all
    # engines let lines rest (scheduler_config.best_effort_share), otherwise 1.
    max_beside_live: NotNegative | None = None


class FrontendConfig(Settings, frozen=True, kw_only=True):
    """The OpenAI frontend, bireme/openai."""

    max_header_bytes: Positive = 64 << 10  # of the request line and headers together
    header_timeout_s: PositiveDuration = 30.0  # from the connection, or the request's first byte, to its last header
    max_body_bytes: Positive = 32 << 20
    body_timeout_s: PositiveDuration = 30.0  # from the headers to the body's last byte
    keep_alive_s: Positive = 30  # an idle connection stays open for so long
    max_connections: Positive = 8192  # one more is answered with 503
    # Without a whole request: for one more the one that has been silent for the longest is closed. Fewer, if all
    # connections need more descriptors than the process may have
    max_idle_connections: Positive = 4096
    comment_interval_s: PositiveDuration = 15.0  # a silent event stream gets a comment so often: proxies keep it open
    playground: bool = True  # the page at /
    live_viewers: NotNegative = 16  # who may watch the live state at once, of all processes together; 0: nobody
    # Without keys, beside localhost, 127.0.0.1 and --host: names by which clients reach the port; .example.com: and all
    # below. A request with another name as Host comes from a web page that means harm, or through a proxy
    allowed_hosts: tuple[Annotated[str, msgspec.Meta(pattern=r"^\.?[\w-]+(\.[\w-]+)*$|^[\da-fA-F:]+$")], ...] = ()
    api_keys: str = ""  # file with keys and their limits (relative to the recipe); "": no key is asked for
    responses: StoredResponsesConfig = StoredResponsesConfig()
    files: FilesConfig = FilesConfig()
    batches: BatchesConfig = BatchesConfig()


class VideoConfig(Settings, frozen=True, kw_only=True):
    """Videos and pictures: what a request gets unless it says otherwise, what it may ask for, where results lie.

    None and "" as a default: the pipeline's own.
    """

    served_model_name: str = ""  # "": the recipe's where it serves nothing else, otherwise the model folder's name
    size: str = ""  # WIDTHxHEIGHT
    seconds: PositiveDuration = 4.0
    fps: Positive | None = None
    num_frames: Positive | None = None  # of a request that gives neither seconds nor fps
    num_inference_steps: Positive | None = None
    guidance_scale: float | None = None
    negative_prompt: str = ""
    max_sequence_length: Positive | None = None  # text tokens that the pipeline pads to
    max_prompt_chars: Positive = 8192
    max_width: Positive = 1920
    max_height: Positive = 1920
    max_pixels: Positive = 1920 * 1088  # width x height
    max_frames: Positive = 257
    max_fps: Positive = 60
    max_steps: Positive = 100
    max_images: Annotated[int, msgspec.Meta(ge=1, le=10)] = 10  # of one request
    max_queue_size: NotNegative = 16  # requests that wait for one worker; one more is refused with RESOURCE_EXHAUSTED
    max_queue_time_s: Duration = 0.0  # waiting longer ends with DEADLINE_EXCEEDED; 0: no limit
    step_timeout_s: PositiveDuration = 600.0  # a step, or decoding, that takes longer: the engine hangs
    max_inline_bytes: Positive = 64 << 20  # of a result in a worker's answer; a larger one is refused
    folder: str = ""  # for results and jobs; "": <BIREME_STATE_DIR or ~/.local/state/bireme>/<recipe>/video
    expiry_s: PositiveDuration = 86_400.0  # results and finished jobs are removed after this
    max_folder_bytes: Positive = 10 << 30  # above it the oldest results are removed
    max_jobs: Positive = 10_000  # jobs that are kept; above it the oldest finished ones are removed
    public_url: str = ""  # beginning of URLs of results, https://videos.example.com; "": the frontend's own address


class MemoryServiceConfig(Settings, frozen=True, kw_only=True):
    """A process of the launch that keeps weights for torch engines: docs/memory_service.md."""

    # engines of one model on one device share a copy, and one that is started again maps it instead of loading
    enabled: bool = False


class SupervisorConfig(Settings, frozen=True, kw_only=True):
    start_timeout_s: PositiveDuration = 600.0  # load and warm-up
    ping_interval_s: PositiveDuration = 0.1
    ping_timeout_s: PositiveDuration = 5.0  # the IO thread does not answer, and not for want of a CPU: it hangs
    stall_timeout_s: PositiveDuration = 60.0  # work queued and one step takes longer: the engine hangs
    max_restarts: NotNegative = 5  # in restart_window_s; then slow_restart_s counts. 0: what has ended stays down
    restart_window_s: PositiveDuration = 300.0
    restart_backoff_s: Duration = 0.1  # doubles with each restart in the window, 10 s at most
    # A further process of each engine has its libraries loaded and begins the next life at once: some 500 MB of memory
    standby: bool = False
    slow_restart_s: Duration = 60.0  # between lives once max_restarts are used up; 0: the worker stays down


AliasSet = Literal["triton_trtllm", "dynamo", "vllm"]


class MetricsConfig(Settings, frozen=True, kw_only=True):
    """What the pages of metrics have: docs/observability.md."""

    # Names under which others look: of Triton's TensorRT-LLM backend, of Dynamo, of vLLM; bireme's own are always there
    aliases: tuple[AliasSet, ...] = ()
    # Upper bounds of a histogram's buckets, without infinity, for bireme's own histograms by name: docs/metrics.md
    buckets: dict[str, tuple[float, ...]] = {}
    max_accounts: NotNegative = 1000  # API keys whose use is counted; that of further ones is (other). 0: none is


class GrpcTlsConfig(Settings, frozen=True, kw_only=True):
    """TLS of tritonserver's gRPC port, which then asks clients for certificates. Files in PEM, beside the recipe."""

    certificate: str = ""  # this host's, with those up to the authority: servers and their clients show it; "": no TLS
    key: str = ""  # its key, without a password
    authority: str = ""  # certificates of the other side are to be signed by one of these
    server_name: str = ""  # that certificates of servers are for; "": the host by which they are reached


class TracesConfig(Settings, frozen=True, kw_only=True):
    """Spans of requests, as OTLP. OTEL_EXPORT_ENABLED, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and OTEL_SERVICE_NAME win."""

    endpoint: str = ""  # of a collector: http://host:4317 is gRPC, http://host:4318/v1/traces HTTP; "": no traces
    # of requests whose caller sends no traceparent; those of others are sampled as it says
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    service_name: str = "bireme"


class RequestLogConfig(Settings, frozen=True, kw_only=True):
    """Records of requests that have ended, a line each, without their text: docs/observability.md."""

    # Folder and beginning of the files' names (relative to the recipe; $NAME and ~ are expanded); "": no log
    path: str = ""
    max_bytes: Annotated[int, msgspec.Meta(ge=64 << 10)] = 64 << 20  # of a file; then the next one is begun
    max_files: Positive = 16  # full ones that a process keeps, compressed; the oldest go
    trace_block_size: Positive = 64  # tokens of a prompt that one hash stands for


class TimelinesConfig(Settings, frozen=True, kw_only=True):
    """What took a request's time, kept by each process of the frontend for its latest requests."""

    max_entries: NotNegative = 0  # 0: none are kept, and no request is traced for them
    max_bytes: Positive = 16 << 20  # of all of them; above it the oldest make room


class ObservabilityConfig(Settings, frozen=True, kw_only=True):
    """What entries (frontend, stubs of pipelines) tell of each request beside metrics."""

    traces: TracesConfig = TracesConfig()
    request_log: RequestLogConfig = RequestLogConfig()
    timelines: TimelinesConfig = TimelinesConfig()


class Recipe(Settings, frozen=True, kw_only=True):
    model: str
    tokenizer: str = ""  # "": the model's
    tokenizer_backend: Literal["auto", "tokenizers", "fastokens"] = "auto"  # what encodes; auto: see text/encoder.py
    # of each process that encodes: tokens kept for long prompts that begin alike; 0: none
    tokenizer_cache_bytes: NotNegative = 64 << 20
    # whether control tokens in prompts without a template count (completions, text_input); false: they are text
    raw_control_tokens: bool = True
    served_model_name: str = ""  # "": the recipe's name
    workers: dict[str, WorkerEntry]
    sampling: dict[str, Any] = {}  # default sampling parameters, weaker than the request's
    limits: Limits = Limits()
    media: MediaLimits = MediaLimits()
    pipeline: PipelineConfig = PipelineConfig()
    router: RouterConfig = RouterConfig()
    kv_events: KvEventsConfig = KvEventsConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    memory_service: MemoryServiceConfig = MemoryServiceConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    grpc_tls: GrpcTlsConfig = GrpcTlsConfig()
    metrics: MetricsConfig = MetricsConfig()
    chat: ChatConfig = ChatConfig()
    frontend: FrontendConfig = FrontendConfig()
    video: VideoConfig = VideoConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    name: str = ""  # the folder's; not in the YAML
    folder: str = ""

    @property
    def model_path(self) -> str:
        """Folder of the model (absolute; of a GGUF file the one that is made of it), or a hub id."""
        return find_model(self.model, self.folder)

    @property
    def tokenizer_path(self) -> str:
        return find_model(self.tokenizer or self.model, self.folder)

    @property
    def chat_template(self) -> str:
        """Path of the file that replaces the model's chat template; "": none does."""
        if not self.chat.template:
            return ""
        path = Path(os.path.expandvars(self.chat.template)).expanduser()
        return str(path if path.is_absolute() else Path(self.folder) / path)

    def worker_model_path(self, stage: str) -> str:
        """Folder (absolute) or hub id of a stage's model: its own, else the recipe's."""
        entry = self.workers.get(stage)
        return find_model((entry.model if entry else "") or self.model, self.folder)

    @property
    def served_name(self) -> str:
        """The name under which text is asked for."""
        return self.served_model_name or self.name

    @property
    def video_name(self) -> str:
        """The name under which videos are asked for."""
        alone = self.served_model_name or self.name
        return self.video.served_model_name or (
            alone if "decode" not in self.workers else Path(self.worker_model_path("video_diffusion")).name
        )

    def entry(self, model_name: str) -> WorkerEntry | None:
        """Return the worker entry of a Triton model: `decode_1` is the second replica of `decode`."""
        return self.workers.get(stage_of(model_name))

    @property
    def encoder_stage(self) -> str:
        """Return the stage whose engines have the vision tower of a model that takes pictures."""
        return next((stage for stage in ("multimodal_encoder", "prefill") if stage in self.workers), "decode")

    @property
    def embedding_backend(self) -> str:
        """Return what moves embeddings: NIXL where it moves KV, of whichever stage, so that all ends have the same."""
        own = [entry.engine_config for entry in self.workers.values() if not entry.kind.moves_own_kv]
        return (
            "NIXL" if any(config.cache_transceiver_config.backend in ("NIXL", "UCX") for config in own) else "DEFAULT"
        )

    def replicas(self, stage: str) -> tuple[str, ...]:
        """Return the Triton model names of a stage's workers; empty when the recipe has none."""
        entry = self.workers.get(stage)
        return tuple(numbered(stage, number) for number in range(entry.replicas)) if entry else ()

    def instances(self, model_name: str) -> tuple[str, ...]:
        """Return the names of a Triton model's stub processes: more than one only of a pipeline."""
        count: int = getattr(self.pipeline.instances, model_name, 1)
        return tuple(numbered(model_name, number) for number in range(count))

    @property
    def routing_mode(self) -> RoutingMode:
        """How placements are decided, unless a request says otherwise."""
        if self.router.mode is not None:
            return self.router.mode
        has_choice = self.discovery.is_shared or any(len(self.replicas(stage)) > 1 for stage in ROUTED_STAGES)
        return "kv" if has_choice else "round_robin"

    @property
    def has_kv_routing(self) -> bool:
        """Whether routers ask what workers hold: then engines publish KV events."""
        return self.routing_mode == "kv"

    @property
    def publishes_events(self) -> bool:
        """Whether the engines of prefill and decode publish KV events."""
        return self.has_kv_routing if self.kv_events.enabled is None else self.kv_events.enabled

    @property
    def has_load_routing(self) -> bool:
        """Whether routers ask how busy workers are: then engines publish their load."""
        by_mode = self.routing_mode in ("kv", "least_loaded", "power_of_two") or bool(self.router.busy)
        kinds = [self.workers[stage].kind for stage in ROUTED_STAGES if stage in self.workers]
        tell = len(kinds) == len(ROUTED_STAGES) and all(kind.tells_prices for kind in kinds)
        return by_mode or (tell and self.router.transfer_ms > 0)  # who computes a prompt goes by what they tell


WORKER_STAGES = ("prefill", "decode", "multimodal_encoder", "embedding", "video_diffusion")


_NEEDED_WORKERS = {"video": "video_diffusion", "logits_processor": ""}  # of models that are no workers; else decode


def missing_worker(stage: str, recipe: Recipe) -> str:
    """Return the worker that a model can't do without and that the recipe has not; "": it has all."""
    needed = stage if stage in WORKER_STAGES else _NEEDED_WORKERS.get(stage, "decode")
    return "" if not needed or needed in recipe.workers else needed


def is_wanted(stage: str, recipe: Recipe) -> bool:
    """Return whether a launch has the model at all: some are for clients that a recipe must name."""
    if stage == "router":
        return recipe.router.has_model
    return recipe.pipeline.tensorrtllm_backend_models or stage not in ("tensorrt_llm_bls", "ensemble")


def numbered(name: str, number: int) -> str:
    """Return the name of a replica, or of a stub of a model with several: decode, decode_1, ..."""
    return f"{name}_{number}" if number else name


def instance_name(model: str, triton_name: str) -> str:
    """Return the name of a stub of `model` that Triton calls generate_0_1: generate_1; "" if it is no such name."""
    match = re.fullmatch(rf"{re.escape(model)}_\d+_(\d+)", triton_name)
    return numbered(model, int(match.group(1))) if match else ""


@functools.lru_cache(maxsize=4096)
def stage_of(worker: str) -> str:
    """decode_1, or decode_1@host:8001 on another server -> decode."""
    return re.sub(r"(_\d+)?(@.*)?$", "", worker)


def worker_id(model_name: str, server: str) -> str:
    """Return what a worker is called outside of its server: decode_1@host:8001; with "" its model's name alone."""
    return f"{model_name}@{server}" if server else model_name


def split_worker(worker: str) -> tuple[str, str]:
    """decode_1@host:8001 -> (decode_1, host:8001); the server of a worker of one's own server is ""."""
    name, _, server = worker.partition("@")
    return name, server


def find_model(model: str, folder: str, key: str = "`model` in recipe.yaml") -> str:
    """Return a model's folder (absolute), made of it where it is a GGUF file, or a hub id. Raises ConfigError.

    `key`: where it stands.
    """
    for base in (Path(), CHECKOUT, Path(folder)):
        candidate = base / model
        if candidate.is_dir() or is_gguf(candidate):
            return str(model_folder(candidate))
    if model.startswith(("models/", "./", "/", "../")) or model.endswith(SUFFIX):
        path = Path(model) if Path(model).is_absolute() else CHECKOUT / model
        if Path(model).name.startswith("tiny-"):
            remedy = "run `make models` (or .venv/bin/python tools/make_sample_model.py) to make it"
        else:
            remedy = f"check {key}"
        raise ConfigError(f"model folder {path} does not exist; {remedy}")
    return model
