"""Every metric, in one table, and the registry that collects them.

Code anywhere (stub, engine process, frontend) changes a `Registry`; only a publisher reads it. An engine process sends
`take_delta()` with its pongs and its stub merges it, so each engine metric shows up on Triton's /metrics. Histograms
are kept as counts per bucket and published as the three series of a Prometheus histogram: one metric call a bucket and
tick, not one an observation (43 µs each).
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from bireme.messages import Capacity

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]  # values, in the order of MetricSpec.labels

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DRAFT_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
_MINUTES = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_TOKENS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 32000, 128000)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, without +Inf


def _counter(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "counter", text, ("worker", *labels))


def _gauge(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "gauge", text, ("worker", *labels))


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> MetricSpec:
    return MetricSpec(name, "histogram", text, ("worker", *labels), buckets)


_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_STEPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_PREFILL = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_TRTLLM_TIMES = {
    "e2e_request_latency": _LONG, "time_to_first_token": (*_FIRST, 2560), "time_per_output_token": _STEPS,
    "request_queue_time": _LONG, "request_prefill_time": _PREFILL,
    "request_decode_time": _LONG, "request_inference_time": _LONG,
}  # fmt: skip
_TRTLLM_COUNTERS = """
    prompt_tokens generation_tokens prompt_cached_tokens prompt_cache_hit_tokens spec_decode_drafted_tokens
    spec_decode_accepted_tokens request_error kv_cache_reused_blocks kv_cache_missed_blocks kv_cache_iter_reused_blocks
    kv_cache_iter_full_reused_blocks kv_cache_iter_partial_reused_blocks kv_cache_iter_missed_blocks
    kv_cache_gen_alloc_blocks kv_cache_onboard_bytes kv_cache_offload_bytes kv_cache_disk_prefetch_blocks
    kv_cache_intra_device_copy_bytes num_requests_completed spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens"""
_TRTLLM_GAUGES = """
    kv_cache_hit_rate kv_cache_utilization kv_cache_host_utilization kv_cache_iter_reuse_rate num_requests_running
    num_requests_waiting max_num_active_requests iteration_latency_seconds gpu_memory_usage_bytes
    cpu_memory_usage_bytes pinned_memory_usage_bytes max_batch_size_static max_batch_size_runtime
    max_num_tokens_runtime kv_cache_max_blocks kv_cache_free_blocks kv_cache_used_blocks kv_cache_tokens_per_block
    num_context_requests num_generation_requests num_paused_requests num_scheduled_requests total_context_tokens
    avg_decoded_tokens_per_iter spec_decode_acceptance_length spec_decode_draft_overhead"""


def _trtllm_series() -> tuple[MetricSpec, ...]:
    """TensorRT-LLM's own series, under the names that its dashboards read; a release has some of them."""
    text = "TensorRT-LLM's own: "
    return (
        _counter("trtllm_request_success_total", f"{text}requests ended, by reason.", "finished_reason"),
        *(_counter(f"trtllm_{name}_total", f"{text}{name}.") for name in _TRTLLM_COUNTERS.split()),
        *(_gauge(f"trtllm_{name}", f"{text}{name}.") for name in _TRTLLM_GAUGES.split()),
        *(_histogram(f"trtllm_{name}_seconds", f"{text}{name}.", bounds) for name, bounds in _TRTLLM_TIMES.items()),
    )


# The first label of each, `worker`, is the Triton model's name (decode, decode_1, generate, ...).
TABLE: dict[str, MetricSpec] = {
    spec.name: spec
    for spec in (
        _counter("bireme_requests_total", "Requests ended, by outcome (stop, length, or an error code).", "outcome"),
        _counter(
            "bireme_request_log_records_total",
            "Lines of the request log: written, lost (a disk that is full or too slow), left_out (with pictures).",
            "result",
        ),
        _counter(
            "bireme_canaries_total",
            "The launch's own probes ended, by outcome; they count nowhere as requests, tokens or latencies.",
            "outcome",
        ),
        _counter("bireme_traceparents_ignored_total", "Requests with a malformed traceparent: a trace begins here."),
        _counter("bireme_trace_spans_exported_total", "Spans that the collector has taken."),
        _counter(
            "bireme_trace_spans_dropped_total",
            "Spans that no collector gets: of traces that the queue had no room for (queue_full), refused or late"
            " (not_taken), left at the end of the process (shutdown).",
            "reason",
        ),
        _histogram("bireme_time_to_first_token_seconds", "From the request's arrival to its first token.", _SECONDS),
        _histogram("bireme_inter_token_latency_seconds", "Gap between two deliveries of a stream.", _SECONDS),
        _histogram(
            "bireme_time_per_output_token_seconds", "Mean gap between a request's tokens, once it has ended.", _SECONDS
        ),
        _histogram("bireme_request_seconds", "From arrival to end.", _SECONDS),
        _histogram("bireme_queue_seconds", "From submission to the first engine step that works on it.", _SECONDS),
        _histogram("bireme_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
        _histogram("bireme_completion_tokens", "Generated tokens of a request.", _TOKENS),
        _counter("bireme_prompt_tokens_total", "Prompt tokens taken in."),
        _counter("bireme_cached_prompt_tokens_total", "Prompt tokens taken from KV block reuse."),
        _counter("bireme_generated_tokens_total", "Tokens generated."),
        _counter("bireme_draft_tokens_total", "Tokens of drafts that the torch engine's steps have verified."),
        _counter("bireme_accepted_draft_tokens_total", "Of these, those that were right and delivered."),
        _histogram("bireme_accepted_draft_length", "Tokens of a draft that were right.", _DRAFT_LENGTHS),
        _counter(
            "bireme_head_imports_total",
            "KV transfers to an engine that drafts with a head, by whether the head's rows came along: whole, missing.",
            "rows",
        ),
        _gauge("bireme_requests_running", "Requests in the batch."),
        _gauge("bireme_requests_waiting", "Requests queued in the engine."),
        _gauge("bireme_kv_blocks_used", "KV blocks referenced by requests or leases."),
        _gauge("bireme_kv_blocks_cached", "Unreferenced KV blocks kept for reuse."),
        _gauge("bireme_kv_blocks_total", "KV blocks of the pool."),
        _gauge("bireme_kv_block_tokens", "Tokens that a KV block holds."),
        _counter(
            "bireme_kv_matched_tokens_total",
            "Prompt tokens found in KV blocks, by the tier where they lay (device, host, disk).",
            "tier",
        ),
        _gauge("bireme_kv_hit_rate", "Share of prompt tokens found in a tier, of the last 1,000 prompts.", "tier"),
        _gauge("bireme_kv_tier_blocks", "KV blocks held in a tier below the device.", "tier"),
        _gauge("bireme_kv_tier_capacity_blocks", "KV blocks that such a tier has room for.", "tier"),
        _counter("bireme_kv_offloaded_blocks_total", "KV blocks copied down into a tier.", "tier"),
        _counter("bireme_kv_offloaded_bytes_total", "Bytes of KV copied down into a tier.", "tier"),
        _counter("bireme_kv_onboarded_blocks_total", "KV blocks of a tier copied to the device.", "tier"),
        _counter("bireme_kv_onboarded_bytes_total", "Bytes of a tier's KV copied to the device.", "tier"),
        _counter(
            "bireme_kv_offload_missed_blocks_total",
            "KV blocks evicted above a tier before they had been copied into it.",
            "tier",
        ),
        _counter(
            "bireme_kv_tier_failures_total",
            "KV blocks that a tier could not take, or did not give back as they were.",
            "tier",
        ),
        _counter("bireme_preemptions_total", "Requests preempted to free KV blocks."),
        _counter(
            "bireme_best_effort_rests_total", "Steps that requests of priority 0, lines of batches, sat out for others."
        ),
        _histogram("bireme_engine_step_seconds", "One engine step.", _SECONDS),
        _counter(
            "bireme_engine_steps_total",
            "Steps of the torch engine by what computed them: modules (transformers' own), packed, quantized, fused, "
            "resident, verify, mixed, decode_graph, prompt_graph.",
            "path",
        ),
        _gauge(
            "bireme_prompt_attention",
            "1 for what attends to long prompts in the torch engine on a GPU: fa3, or torch (FlashAttention 2).",
            "kernel",
        ),
        _gauge(
            "bireme_weights_form",
            "1 for what the torch engine keeps the layers' projections in: plain (the model's dtype), fp8_channel, "
            "fp8_blocks, int4_groups, mxfp4 (a mixture's experts alone), and on a CPU a GGUF file's q4_0, q4_1, q8_0.",
            "form",
        ),
        _gauge(
            "bireme_kv_form",
            "1 for what the torch engine keeps keys and values in: the model's dtype, or float8_e4m3fn.",
            "form",
        ),
        _histogram(
            "bireme_forward_pass_seconds",
            "One engine step by what it computed (prefill, decode, mixed), with kv_events.step_records.",
            _SECONDS,
            "kind",
        ),
        _histogram("bireme_forward_pass_tokens", "Tokens that such a step computed.", _TOKENS, "kind"),
        _counter("bireme_step_records_lost_total", "Step records dropped before they were sent."),
        _gauge("bireme_engine_load_seconds", "Time from start to ready of this engine life."),
        _counter(
            "bireme_weights_loads_total",
            "Engine starts by where their weights came from (checkpoint, memory_service).",
            "source",
        ),
        _gauge(
            "bireme_weights_load_seconds",
            "Time in which this engine life read its weights; 0: it has mapped what another one read.",
        ),
        _gauge("bireme_weights_attach_seconds", "Time in which this engine life mapped shared weights."),
        _gauge("bireme_weights_shared_bytes", "Weights of this engine that the memory service keeps."),
        _gauge("bireme_weights_engines", "Engines that share these weights now."),
        _gauge("bireme_engine_max_batch_size", "Requests that a step of the engine takes."),
        _gauge("bireme_engine_max_num_tokens", "Tokens that a step of the engine takes."),
        _gauge("bireme_engine_max_queue_size", "Requests that may wait in the engine; more are refused."),
        _gauge("bireme_engine_max_seq_len", "Tokens of a sequence, the prompt's and generated ones."),
        _counter("bireme_engine_restarts_total", "Engine processes started again, by cause.", "cause"),
        _gauge("bireme_engine_asleep", "1 while the worker sleeps: its engine has given back its memory."),
        _gauge("bireme_engine_up", "1 when the engine process is ready."),
        _counter("bireme_kv_transfer_bytes_total", "KV bytes moved, by direction (export, import).", "direction"),
        _histogram("bireme_kv_transfer_seconds", "One KV transfer, claim to acknowledgement.", _SECONDS, "direction"),
        _counter("bireme_kv_transfer_failures_total", "KV transfers that failed, by cause.", "cause"),
        _gauge("bireme_kv_leases", "Leases of exported KV by state.", "state"),
        _counter("bireme_kv_leases_expired_total", "Leases freed because nobody claimed them in time."),
        _gauge("bireme_kv_transfer_buffer_bytes", "Bytes of the bounded transfer buffer in use."),
        _gauge(
            "bireme_kv_staging_bytes",
            "Host memory through which a GPU's KV passes in transfers, by kind: pinned, or pageable, which is slower.",
            "kind",
        ),
        _counter("bireme_cancellations_total", "Requests cancelled by their client or by an abort."),
        _counter("bireme_migrations_total", "Streams continued on another engine or engine life."),
        _counter("bireme_routed_total", "Placements decided, by worker chosen.", "target"),
        _counter(
            "bireme_routed_generations_total",
            "Placements decided while several generations serve, by generation of the decode worker.",
            "generation",
        ),
        _counter(
            "bireme_routing_decisions_total",
            "Placements by what decided (a mode, only, direct, session), and refusals because all workers were busy"
            " (refused).",
            "reason",
        ),
        _counter(
            "bireme_prompts_placed_total",
            "Prompts of a disaggregated recipe by who computes them: prefill, or decode where a transfer costs more.",
            "stage",
        ),
        _gauge("bireme_router_index_blocks", "KV blocks that the router knows of."),
        _gauge("bireme_router_index_memberships", "Holdings that it knows of: blocks by worker and tier."),
        _gauge("bireme_router_index_bytes", "Memory of its index."),
        _counter("bireme_router_prompt_tokens_total", "Prompt tokens of requests with a prediction."),
        _counter("bireme_router_predicted_tokens_total", "Of those, tokens that the router expected to be cached."),
        _counter("bireme_router_cached_tokens_total", "Of those, tokens that were."),
        _counter(
            "bireme_router_mispredicted_tokens_total",
            "Difference between the cached tokens expected and found, summed over requests.",
        ),
        _histogram(
            "bireme_router_prediction_error_tokens",
            "Difference between the cached tokens expected and found, of a request.",
            (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536),
        ),
        _gauge(
            "bireme_discovery_stale",
            "1 while the shared store of worker records can't be reached and requests go by the last view.",
            "model",
        ),
        _gauge("bireme_bus_subscriptions", "Open token-bus subscriptions."),
        _counter("bireme_bus_dropped_total", "Subscriptions dropped because the consumer fell behind."),
        _gauge("bireme_streams", "Response streams open in the stub."),
        _counter("bireme_responses_total", "Responses sent to clients by the stub."),
        _counter(
            "bireme_tokenized_tokens_total",
            "Tokens of prompts of more than 4096 characters, by where they come from (cache, encoder).",
            "source",
        ),
        _gauge("bireme_tokenizer_cache_bytes", "Texts and tokens kept for prompts that begin alike."),
        _counter(
            "bireme_mirror_copies_total",
            "Requests that were to be sent to another launch as well, by what came of it.",
            "outcome",
        ),
        _histogram(
            "bireme_mirror_first_token_seconds",
            "Of streams sent to another launch as well: from arrival to the first event, here (old) and there (new).",
            _SECONDS,
            "side",
        ),
        _counter(
            "bireme_planner_decisions_total",
            "Decisions: hold (what was seen can't be believed), same, up, down, both (one stage up, the other down).",
            "result",
        ),
        _counter(
            "bireme_planner_holds_total", "Decisions that were held, by the word that begins the reason.", "cause"
        ),
        _counter("bireme_planner_failures_total", "Decisions that could not be carried out."),
        _gauge("bireme_planner_acts", "1 while it carries out what it decides, 0 while it advises."),
        _gauge("bireme_planner_decided_at_seconds", "When the last decision was made, in Unix time."),
        _gauge("bireme_planner_budget_gpus", "GPUs that all workers together may have."),
        _gauge("bireme_planner_requests_per_second", "Requests that came in the last interval that was believed."),
        _gauge(
            "bireme_planner_workers",
            "Workers at the last decision, by state: ready, starting, ending.",
            "stage",
            "state",
        ),
        _gauge("bireme_planner_workers_wanted", "Workers that there should be, by the last decision.", "stage"),
        _counter("bireme_http_requests_total", "HTTP requests answered by the frontend.", "path", "status"),
        _gauge("bireme_frontend_ready", "1 while the frontend can answer for every model, as /health/ready says."),
        _gauge("bireme_http_requests_active", "HTTP requests that the frontend is working on."),
        _counter("bireme_batch_lines_total", "Lines of batches answered, by status of the answer.", "status"),
        _counter("bireme_rate_limited_total", "Requests refused by a key's own limit.", "key"),
        _counter(
            "bireme_key_prompt_tokens_total", "Prompt tokens of an API key's requests, as their usage says.", "key"
        ),
        _counter("bireme_key_cached_tokens_total", "Of those, tokens taken from KV block reuse.", "key"),
        _counter("bireme_key_computed_tokens_total", "Prompt tokens that engines computed for a key.", "key"),
        _counter("bireme_key_generated_tokens_total", "Tokens generated for a key.", "key"),
        _counter(
            "bireme_key_engine_seconds_total",
            "Time that a key's sequences spent in engines' prefill and decode; those of one batch share it.",
            "key",
        ),
        _gauge("bireme_model_requests_active", "Requests of a model that the frontend is working on.", "model"),
        _gauge(
            "bireme_model_requests_queued", "Of their sequences, those without a token. For Dynamo's names.", "model"
        ),
        _histogram("bireme_answered_prompt_tokens", "Prompt tokens of a sequence. For Dynamo's names.", _TOKENS),
        _histogram("bireme_answered_cached_tokens", "Of those, cached ones. For Dynamo's names.", _TOKENS),
        _histogram("bireme_answered_generated_tokens", "Tokens of an answer. For Dynamo's names.", _TOKENS),
        _counter("bireme_embedding_cache_hits_total", "Pictures that needed no encoding."),
        _counter("bireme_embedding_cache_misses_total", "Pictures that had to be encoded."),
        _counter("bireme_embedding_cache_evictions_total", "Embeddings dropped for want of room."),
        _gauge("bireme_embedding_cache_bytes", "Embeddings kept."),
        _gauge("bireme_embedding_cache_entries", "Pictures whose embeddings are kept."),
        _gauge(
            "bireme_bls_threads_lost",
            "Threads for calls to other models that are held by calls to a stub that has died.",
        ),
        _counter("bireme_images_encoded_total", "Pictures that went through the vision tower."),
        _histogram("bireme_image_encode_seconds", "One batch of pictures in the vision tower.", _SECONDS),
        _counter("bireme_video_steps_total", "Denoising steps done."),
        _histogram("bireme_video_generation_seconds", "One video or set of pictures, encoding included.", _MINUTES),
        _counter("bireme_video_frames_total", "Frames and pictures delivered."),
        _gauge("bireme_video_jobs", "Jobs of /v1/videos by status.", "status"),
        _gauge("bireme_video_files_bytes", "Results kept in the served folder."),
        _counter("bireme_kv_events_total", "KV events recorded by type (stored, removed, updated).", "type"),
        _counter("bireme_kv_event_gaps_total", "KV events that the engine lost before they were read."),
        _counter("bireme_kv_event_batches_total", "Batches of KV events published."),
        _gauge("bireme_kv_publisher_up", "1 while KV events and load can be sent."),
        _counter("bireme_kv_event_replays_total", "Readers' requests for missed KV events."),
        _counter("bireme_kv_event_errors_total", "Errors of the publisher, by what failed (publish, turn).", "at"),
        _counter("bireme_kv_feed_gaps_total", "Batches of KV events that a router missed and asked for."),
        _counter("bireme_kv_feed_resyncs_total", "Times that a router came into step with a worker's events."),
        _counter("bireme_kv_feed_discarded_total", "Messages that a router left out, by reason.", "reason"),
        _gauge("bireme_kv_feed_lag_seconds", "Age of KV events when the router's index took them."),
        *_trtllm_series(),
    )
}


MAX_BUCKETS = 64  # of a histogram: each is a series of every worker


def use_buckets(buckets: Mapping[str, Sequence[float]]) -> None:
    """Have this process's histograms these upper bounds; before the first observation, and checked."""
    for name, bounds in buckets.items():
        TABLE[name] = replace(TABLE[name], buckets=tuple(bounds))


class MetricDelta(msgspec.Struct, array_like=True):
    """What changed since the last take: [name, label values, number or (bucket counts, sum)]."""

    counters: list[tuple[str, Labels, float]]
    gauges: list[tuple[str, Labels, float]]
    histograms: list[tuple[str, Labels, list[int], float]]  # counts a bucket, the last is +Inf


class Registry:
    """Thread-safe accumulators of the metrics in TABLE."""

    def __init__(self, worker: str = "") -> None:
        self.worker = worker
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], tuple[list[int], list[float]]] = {}

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Increase a counter; `worker` is put first when the table says so."""
        key = self._key(name, labels)
        with self._lock:
            self._counters[key] = self._counters.get(key, 0.0) + amount

    def start(self, *names: str, labels: Labels = ()) -> None:
        """Publish counters from now on: a series that begins with its first event has no increase to alert on."""
        for name in names:
            self.add(name, 0, *labels)

    def set(self, name: str, value: float, *labels: str) -> None:
        key = self._key(name, labels)
        with self._lock:
            self._gauges[key] = float(value)  # a flag, which msgpack would tell from a number

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        key = self._key(name, labels)
        bounds = TABLE[name].buckets
        with self._lock:
            if key not in self._histograms:
                self._histograms[key] = ([0] * (len(bounds) + 1), [0.0])
            counts, total = self._histograms[key]
            counts[bisect.bisect_left(bounds, value)] += times
            total[0] += value * times

    def count_end(self, outcome: str, seconds: float | None = None, is_canary: bool = False) -> None:
        """Count a request that has ended; a canary is no load, and counted apart. `seconds`: None: it never began."""
        if is_canary:
            self.add("bireme_canaries_total", 1, outcome)
            return
        self.add("bireme_requests_total", 1, outcome)
        if seconds is not None:
            self.observe("bireme_request_seconds", seconds)

    def take_delta(self) -> MetricDelta:
        """Return the increments and forget them; gauges come with their present value each time."""
        with self._lock:
            counters, self._counters = self._counters, {}
            histograms, self._histograms = self._histograms, {}
            gauges = [(name, labels, value) for (name, labels), value in self._gauges.items()]
        return MetricDelta(
            [(name, labels, value) for (name, labels), value in counters.items()],
            gauges,
            [(name, labels, counts, total[0]) for (name, labels), (counts, total) in histograms.items()],
        )

    def merge(self, delta: MetricDelta) -> None:
        with self._lock:
            for name, labels, value in delta.counters:
                key = (name, tuple(labels))
                self._counters[key] = self._counters.get(key, 0.0) + value
            for name, labels, value in delta.gauges:
                self._gauges[(name, tuple(labels))] = value
            for name, labels, counts, total in delta.histograms:
                own = self._histograms.setdefault((name, tuple(labels)), ([0] * len(counts), [0.0]))
                own[0][:] = [a + b for a, b in zip(own[0], counts, strict=True)]
                own[1][0] += total

    def _key(self, name: str, labels: tuple[str, ...]) -> tuple[str, Labels]:
        spec = TABLE[name]
        if len(labels) + 1 == len(spec.labels):
            labels = (self.worker, *labels)
        assert len(labels) == len(spec.labels), f"{name} has labels {spec.labels}, got {labels}"
        return name, labels


encode_delta = msgspec.msgpack.Encoder().encode
decode_delta = msgspec.msgpack.Decoder(MetricDelta).decode


def limits_of(capacity: Capacity, worker: str) -> MetricDelta:
    """Return what a worker takes, as levels."""
    levels = {
        "bireme_engine_max_batch_size": capacity.max_batch_size,
        "bireme_engine_max_num_tokens": capacity.max_num_tokens,
        "bireme_engine_max_queue_size": capacity.max_queue_size,
        "bireme_engine_max_seq_len": capacity.max_seq_len,
        "bireme_kv_block_tokens": capacity.tokens_per_block,
    }
    return MetricDelta([], [(name, (worker,), float(level)) for name, level in levels.items()], [])
