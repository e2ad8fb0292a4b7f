"""Serving: what clients get, how fast, and what holds them up."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from tools.dashboards.panels import (
    EACH_ENGINE_S_OWN,
    KV_LIMITS,
    TOKENS_A_SECOND,
    Board,
    Limits,
    Row,
    busy,
    heatmap,
    lines,
    number,
    part,
    percentiles,
    rare,
    ready,
)
from tools.dashboards.queries import ALL, CLIENTS, by, level, quantile, rate, rest, share

OF_CLIENTS, OF_ENGINES = by("worker", side="clients"), by("worker", side="engines")
FAILURES = "UNAVAILABLE|INTERNAL|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED"  # as the alert RequestsFail has them
FAILED = Limits(0.01, 0.05)
FIRST_TOKEN, GAP = Limits(2.5, 5), Limits(0.25, 0.5)  # red where FirstTokensLate and TokensLate begin

NOW = Row(
    "Now",
    [
        [
            number("Requests", rate("bireme_requests_total", CLIENTS), units.RequestsPerSecond),
            number(
                "Failed",
                rest("bireme_requests_total", "bireme_requests_total", CLIENTS, f'outcome!~"{FAILURES}"'),
                units.PercentUnit,
                limits=FAILED,
                note="Faults of the deployment, not of requests.",
            ),
            number(
                "First token, p95",
                quantile(0.95, "bireme_time_to_first_token_seconds", CLIENTS),
                units.Seconds,
                limits=FIRST_TOKEN,
            ),
            number(
                "Gap between tokens, p95",
                quantile(0.95, "bireme_inter_token_latency_seconds", CLIENTS),
                units.Seconds,
                limits=GAP,
            ),
            number("Generated", rate("bireme_generated_tokens_total", ALL), TOKENS_A_SECOND),
            number(
                "Prompt tokens from reuse",
                share("bireme_cached_prompt_tokens_total", "bireme_prompt_tokens_total", ALL),
                units.PercentUnit,
                note=EACH_ENGINE_S_OWN,
            ),
        ],
        [
            number("Running", level("bireme_requests_running", ALL)),
            number("Waiting", level("bireme_requests_waiting", ALL)),
            number(
                "KV blocks in use",
                share("bireme_kv_blocks_used", "bireme_kv_blocks_total", ALL),
                units.PercentUnit,
                limits=KV_LIMITS,
            ),
            number("Streams", level("bireme_streams", ALL)),
            ready("Engines ready", "bireme_engine_up"),
            ready("Frontends ready", "bireme_frontend_ready"),
        ],
    ],
)

TRAFFIC = Row(
    "Traffic",
    [
        [
            lines(
                "Requests by outcome",
                "bireme_requests_total",
                units.RequestsPerSecond,
                choice=by("worker", "outcome", side="clients"),
                shape="stacked",
            ),
            lines(
                "Tokens",
                {
                    "bireme_generated_tokens_total": "generated",
                    "bireme_prompt_tokens_total": "prompt",
                    "bireme_cached_prompt_tokens_total": "prompt, reused",
                },
                TOKENS_A_SECOND,
            ),
            lines(
                "Requests in the engines",
                {"bireme_requests_running": "running", "bireme_requests_waiting": "waiting"},
            ),
        ],
        [
            percentiles("Prompt tokens of a request", "bireme_prompt_tokens", units.Short),
            percentiles("Generated tokens of a request", "bireme_completion_tokens", units.Short),
            lines(
                "Responses and tokens",
                {"bireme_responses_total": "responses", "bireme_generated_tokens_total": "tokens"},
                units.EventsPerSecond,
                note="Fewer responses than tokens: several tokens go out in one.",
            ),
        ],
    ],
)

LATENCY = Row(
    "Latency",
    [
        [
            percentiles(
                "Time to first token", "bireme_time_to_first_token_seconds", choice=OF_CLIENTS, limits=FIRST_TOKEN
            ),
            heatmap("Time to first token, all clients", "bireme_time_to_first_token_seconds", choice=CLIENTS),
        ],
        [
            percentiles(
                "Gap between deliveries of a stream",
                "bireme_inter_token_latency_seconds",
                choice=OF_CLIENTS,
                limits=GAP,
            ),
            heatmap("Gap between deliveries, all clients", "bireme_inter_token_latency_seconds", choice=CLIENTS),
        ],
        [
            percentiles(
                "Mean gap of a request",
                "bireme_time_per_output_token_seconds",
                choice=OF_CLIENTS,
                limits=GAP,
            ),
            heatmap("Mean gap of a request, all clients", "bireme_time_per_output_token_seconds", choice=CLIENTS),
        ],
        [
            percentiles("Queue", "bireme_queue_seconds"),
            percentiles("Whole request", "bireme_request_seconds", choice=OF_CLIENTS),
            percentiles("Engine step", "bireme_engine_step_seconds"),
        ],
    ],
)

FRONTEND = Row(
    "Frontend and back-pressure",
    [
        [
            lines("HTTP answers", "bireme_http_requests_total", units.RequestsPerSecond, choice=by("path", "status")),
            lines("HTTP requests under way", "bireme_http_requests_active"),
            lines(
                "Streams and subscriptions", {"bireme_streams": "streams", "bireme_bus_subscriptions": "subscriptions"}
            ),
        ],
        [
            rare(
                "Cancelled, dropped, migrated",
                {
                    "bireme_cancellations_total": "cancelled",
                    "bireme_bus_dropped_total": "dropped",
                    "bireme_migrations_total": "migrated",
                },
            ),
            lines("Refused by a key's limit", "bireme_rate_limited_total", units.RequestsPerSecond, choice=by("key")),
            lines(
                "Tokens of long prompts",
                "bireme_tokenized_tokens_total",
                TOKENS_A_SECOND,
                choice=by("worker", "source"),
            ),
        ],
        [
            lines("Batch lines", "bireme_batch_lines_total", units.RequestsPerSecond, choice=by("status")),
            lines("Tokenizer's cache", "bireme_tokenizer_cache_bytes", units.BytesIEC),
            lines("Threads held by dead stubs", "bireme_bls_threads_lost", limits=Limits(1, 4)),
        ],
    ],
)

ENGINES = Row(
    "Engines",
    [
        [
            lines(
                "Requests of engines by outcome",
                "bireme_requests_total",
                units.RequestsPerSecond,
                choice=by("worker", "outcome", side="engines"),
                shape="stacked",
                note="Prefill's requests end with not_finished: decode goes on with them.",
            ),
            percentiles("Time to first token, in engines", "bireme_time_to_first_token_seconds", choice=OF_ENGINES),
            percentiles("Gap between deliveries, in engines", "bireme_inter_token_latency_seconds", choice=OF_ENGINES),
        ],
        [
            busy(
                "Time in steps",
                "bireme_engine_step_seconds",
                note="An engine near 100 % has no time left: more requests make steps longer, or wait.",
            ),
            lines(
                "Steps by what computed them",
                "bireme_engine_steps_total",
                units.OpsPerSecond,
                choice=by("worker", "path"),
                shape="stacked",
            ),
            rare(
                "Preempted and rested",
                {"bireme_preemptions_total": "preempted", "bireme_best_effort_rests_total": "rested"},
            ),
        ],
        [
            lines(
                "Tokens of drafts",
                {"bireme_draft_tokens_total": "verified", "bireme_accepted_draft_tokens_total": "right"},
                TOKENS_A_SECOND,
                note="Where few are right an engine drafts less by itself.",
            ),
            percentiles("Right tokens of a draft", "bireme_accepted_draft_length", units.Short),
            rare(
                "KV for a head, with its rows or without",
                "bireme_head_imports_total",
                choice=by("worker", "rows"),
                note="Without them fewer drafts are right: give prefill the same head.",
            ),
        ],
        [
            lines("Attention of long prompts", "bireme_prompt_attention", choice=by("worker", "kernel"), combine="max"),
            lines("Form of the weights", "bireme_weights_form", choice=by("worker", "form"), combine="max"),
            lines("Form of KV", "bireme_kv_form", choice=by("worker", "form"), combine="max"),
        ],
        [
            lines("Ready and asleep", {"bireme_engine_up": "ready", "bireme_engine_asleep": "asleep"}),
            rare("Restarts", "bireme_engine_restarts_total", choice=by("worker", "cause")),
            lines("Load time of this life", "bireme_engine_load_seconds", units.Seconds, combine="max"),
            lines(
                "Probes of the launch", "bireme_canaries_total", units.RequestsPerSecond, choice=by("worker", "outcome")
            ),
        ],
    ],
)

RECORDS = Row(
    "Request log and traces",
    [
        [
            lines(
                "Lines of the request log",
                "bireme_request_log_records_total",
                units.RecordsPerSecond,
                choice=by("worker", "result"),
                shape="stacked",
            ),
            lines("Spans that the collector takes", "bireme_trace_spans_exported_total", units.RecordsPerSecond),
            rare("Spans that no collector gets", "bireme_trace_spans_dropped_total", choice=by("worker", "reason")),
            rare("Malformed traceparents", "bireme_traceparents_ignored_total"),
        ],
    ],
    is_rare=True,
)

MIRROR = Row(
    "Requests copied to another launch",
    [
        [
            rare("What came of them", "bireme_mirror_copies_total", choice=by("outcome")),
            percentiles("First event of streams", "bireme_mirror_first_token_seconds", choice=by("side")),
        ],
    ],
    is_rare=True,
)

BY_KIND = by("worker", "kind")
STEPS = Row(
    "Step records",
    [
        [
            busy("Time in steps by what they computed", "bireme_forward_pass_seconds", choice=BY_KIND),
            percentiles("One step, by what it computed", "bireme_forward_pass_seconds", choice=BY_KIND),
            percentiles("Tokens of a step", "bireme_forward_pass_tokens", units.Short, choice=BY_KIND),
        ],
        [
            heatmap("One step", "bireme_forward_pass_seconds"),
            heatmap("Tokens of a step, all engines", "bireme_forward_pass_tokens", units.Short),
            rare("Records dropped before they were sent", "bireme_step_records_lost_total"),
        ],
    ],
    is_rare=True,
)

CAPACITY = Row(
    "What engines take",
    [
        [
            part("Batch in use", ("bireme_requests_running", "bireme_engine_max_batch_size"), limits=Limits(0.9, 1)),
            part("Queue in use", ("bireme_requests_waiting", "bireme_engine_max_queue_size"), limits=Limits(0.5, 0.9)),
            lines(
                "Requests of a step, and of the queue",
                {"bireme_engine_max_batch_size": "a step", "bireme_engine_max_queue_size": "the queue"},
                combine="max",
            ),
            lines(
                "Tokens of a step, a sequence and a KV block",
                {
                    "bireme_engine_max_num_tokens": "a step",
                    "bireme_engine_max_seq_len": "a sequence",
                    "bireme_kv_block_tokens": "a block",
                },
                combine="max",
            ),
        ],
    ],
)

OF_MODELS = by("model")
ACCOUNTS = Row(
    "API keys and models",
    [
        [
            lines(
                "Prompt tokens of keys",
                {
                    "bireme_key_prompt_tokens_total": "prompt",
                    "bireme_key_cached_tokens_total": "cached",
                    "bireme_key_computed_tokens_total": "computed",
                },
                TOKENS_A_SECOND,
                choice=by("key"),
            ),
            lines("Generated tokens of keys", "bireme_key_generated_tokens_total", TOKENS_A_SECOND, choice=by("key")),
            lines(
                "Engines' time of keys",
                "bireme_key_engine_seconds_total",
                units.PercentUnit,
                choice=by("key"),
                shape="stacked",
                note="100 % is one sequence at work all the time.",
            ),
        ],
        [
            lines(
                "Requests of models",
                {"bireme_model_requests_active": "active", "bireme_model_requests_queued": "without a token"},
                choice=OF_MODELS,
            ),
            percentiles("Prompt tokens of a sequence", "bireme_answered_prompt_tokens", units.Short),
            percentiles("Cached tokens of a sequence", "bireme_answered_cached_tokens", units.Short),
            percentiles("Tokens of an answer", "bireme_answered_generated_tokens", units.Short),
        ],
    ],
    is_rare=True,
)

WEIGHTS = Row(
    "Weights",
    [
        [
            rare("Loads by source", "bireme_weights_loads_total", choice=by("worker", "source")),
            lines(
                "Time to read and to map",
                {"bireme_weights_load_seconds": "read", "bireme_weights_attach_seconds": "mapped"},
                units.Seconds,
                combine="max",
            ),
            lines("Engines that share them", "bireme_weights_engines", combine="max"),
        ],
    ],
    is_rare=True,
)

MEDIA = Row(
    "Pictures and videos",
    [
        [
            lines("Pictures encoded", "bireme_images_encoded_total", units.OpsPerSecond),
            percentiles("One batch of pictures", "bireme_image_encode_seconds"),
            lines(
                "Embeddings from the cache",
                {
                    "bireme_embedding_cache_hits_total": "hits",
                    "bireme_embedding_cache_misses_total": "misses",
                    "bireme_embedding_cache_evictions_total": "evictions",
                },
                units.OpsPerSecond,
            ),
        ],
        [
            lines("Embeddings kept", "bireme_embedding_cache_bytes", units.BytesIEC),
            lines("Pictures with embeddings kept", "bireme_embedding_cache_entries"),
            percentiles("One video or set of pictures", "bireme_video_generation_seconds"),
        ],
        [
            lines("Denoising steps", "bireme_video_steps_total", units.OpsPerSecond),
            lines("Frames and pictures delivered", "bireme_video_frames_total", units.OpsPerSecond),
            lines("Jobs of videos", "bireme_video_jobs", choice=by("status"), shape="stacked"),
            lines("Files of videos", "bireme_video_files_bytes", units.BytesIEC),
        ],
    ],
    is_rare=True,
)

TRTLLM = Row(
    "TensorRT-LLM's own",
    [
        [
            lines(
                "Requests",
                {"trtllm_num_requests_running": "running", "trtllm_num_requests_waiting": "waiting"},
            ),
            lines("Iteration", "trtllm_iteration_latency_seconds", units.Seconds, combine="max"),
            percentiles("Time to first token", "trtllm_time_to_first_token_seconds"),
        ],
        [
            percentiles("Time a token", "trtllm_time_per_output_token_seconds"),
            percentiles("Queue", "trtllm_request_queue_time_seconds"),
            lines("Tokens a step with drafts", "trtllm_spec_decode_acceptance_length", combine="avg"),
        ],
    ],
    is_rare=True,
)

PLANNER = Row(
    "Planner",
    [
        [
            lines(
                "Workers and what is wanted",
                {"bireme_planner_workers": "there", "bireme_planner_workers_wanted": "wanted"},
                choice=by("stage"),
            ),
            lines("Workers by state", "bireme_planner_workers", choice=by("state")),
            lines(
                "Requests that it saw",
                "bireme_planner_requests_per_second",
                units.RequestsPerSecond,
            ),
        ],
        [
            lines("Decisions", "bireme_planner_decisions_total", units.OpsPerSecond, choice=by("result")),
            lines("Held, by cause", "bireme_planner_holds_total", units.OpsPerSecond, choice=by("cause")),
            lines("Not carried out", "bireme_planner_failures_total", units.OpsPerSecond),
        ],
        [
            lines("Budget", "bireme_planner_budget_gpus"),
            lines("Acts", "bireme_planner_acts"),
            lines("Last decision", "bireme_planner_decided_at_seconds", units.DateTimeFromNow),
        ],
    ],
    is_rare=True,
)

BOARD = Board(
    "serving",
    "bireme: serving",
    "What clients get and how fast: traffic, latency, outcomes, queues, the frontend and the engines.",
    (
        NOW,
        TRAFFIC,
        LATENCY,
        FRONTEND,
        ENGINES,
        CAPACITY,
        ACCOUNTS,
        RECORDS,
        MIRROR,
        PLANNER,
        STEPS,
        WEIGHTS,
        MEDIA,
        TRTLLM,
    ),
)
