"""KV: blocks, what is found in them, the tiers below the device, the events about them, and memory."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from tools.dashboards.panels import (
    BLOCKS_A_SECOND,
    EACH_ENGINE_S_OWN,
    KV_LIMITS,
    TOKENS_A_SECOND,
    Board,
    Limits,
    Row,
    lines,
    number,
    part,
    rare,
)
from tools.dashboards.queries import ALL, by, level, rate, share

BY_TIER = by("worker", "tier")

NOW = Row(
    "Now",
    [
        [
            number(
                "Blocks in use",
                share("bireme_kv_blocks_used", "bireme_kv_blocks_total", ALL),
                units.PercentUnit,
                limits=KV_LIMITS,
            ),
            number(
                "Prompt tokens from reuse",
                share("bireme_cached_prompt_tokens_total", "bireme_prompt_tokens_total", ALL),
                units.PercentUnit,
                note=EACH_ENGINE_S_OWN,
            ),
            number("Blocks kept for reuse", level("bireme_kv_blocks_cached", ALL)),
            number("Waiting requests", level("bireme_requests_waiting", ALL)),
            number("KV events", rate("bireme_kv_events_total", ALL), units.EventsPerSecond),
            number("Transfer buffer", level("bireme_kv_transfer_buffer_bytes", ALL), units.BytesIEC),
        ]
    ],
)

BLOCKS = Row(
    "Blocks",
    [
        [
            part("Blocks in use", ("bireme_kv_blocks_used", "bireme_kv_blocks_total"), limits=KV_LIMITS),
            lines(
                "Blocks",
                {
                    "bireme_kv_blocks_used": "in use",
                    "bireme_kv_blocks_cached": "kept",
                    "bireme_kv_blocks_total": "of the pool",
                },
            ),
            rare("Preemptions", "bireme_preemptions_total"),
        ],
    ],
)

HITS = Row(
    "What prompts find",
    [
        [
            part("Prompt tokens from reuse", ("bireme_cached_prompt_tokens_total", "bireme_prompt_tokens_total")),
            lines(
                "Prompt tokens found, by tier",
                "bireme_kv_hit_rate",
                units.PercentUnit,
                choice=BY_TIER,
                combine="avg",
                top=1,
            ),
            lines(
                "Tokens found, by tier",
                "bireme_kv_matched_tokens_total",
                TOKENS_A_SECOND,
                choice=BY_TIER,
                shape="stacked",
            ),
        ],
    ],
)

TIERS = Row(
    "Tiers below the device",
    [
        [
            part(
                "Room used",
                ("bireme_kv_tier_blocks", "bireme_kv_tier_capacity_blocks"),
                choice=BY_TIER,
                limits=Limits(0.95, 1),
            ),
            lines("Blocks copied down", "bireme_kv_offloaded_blocks_total", BLOCKS_A_SECOND, choice=BY_TIER),
            lines("Blocks that came back", "bireme_kv_onboarded_blocks_total", BLOCKS_A_SECOND, choice=BY_TIER),
        ],
        [
            lines("Blocks held", "bireme_kv_tier_blocks", choice=BY_TIER),
            lines("Bytes copied down", "bireme_kv_offloaded_bytes_total", units.BytesPerSecondSI, choice=BY_TIER),
            lines("Bytes that came back", "bireme_kv_onboarded_bytes_total", units.BytesPerSecondSI, choice=BY_TIER),
        ],
        [
            rare("Evicted before they were copied", "bireme_kv_offload_missed_blocks_total", choice=BY_TIER),
            rare("Blocks that a tier failed", "bireme_kv_tier_failures_total", choice=BY_TIER),
        ],
    ],
)

EVENTS = Row(
    "Events",
    [
        [
            lines("KV events", "bireme_kv_events_total", units.EventsPerSecond, choice=by("worker", "type")),
            lines("Batches published", "bireme_kv_event_batches_total", units.MessagesPerSecond),
            lines(
                "Publisher works",
                "bireme_kv_publisher_up",
                combine="max",
                top=1,
                note="A worker at 0 can't tell routers what it holds.",
            ),
        ],
        [
            rare("Events lost before they were read", "bireme_kv_event_gaps_total"),
            rare("Missed events asked for again", "bireme_kv_event_replays_total"),
            rare("Errors of the publisher", "bireme_kv_event_errors_total", choice=by("worker", "at")),
        ],
    ],
)

MEMORY = Row(
    "Memory",
    [
        [
            lines("Transfer buffer in use", "bireme_kv_transfer_buffer_bytes", units.BytesIEC),
            lines("Host memory of transfers", "bireme_kv_staging_bytes", units.BytesIEC, choice=by("worker", "kind")),
            lines("Weights in the memory service", "bireme_weights_shared_bytes", units.BytesIEC, combine="max"),
        ],
    ],
)

TRTLLM = Row(
    "TensorRT-LLM's own",
    [
        [
            lines(
                "KV cache in use",
                "trtllm_kv_cache_utilization",
                units.PercentUnit,
                combine="avg",
                top=1,
                limits=KV_LIMITS,
            ),
            lines("KV cache hits", "trtllm_kv_cache_hit_rate", units.PercentUnit, combine="avg", top=1),
            lines("Host tier in use", "trtllm_kv_cache_host_utilization", units.PercentUnit, combine="avg", top=1),
        ],
        [
            lines(
                "Blocks",
                {
                    "trtllm_kv_cache_used_blocks": "in use",
                    "trtllm_kv_cache_free_blocks": "free",
                    "trtllm_kv_cache_max_blocks": "of the pool",
                },
            ),
            lines(
                "Host tier",
                {"trtllm_kv_cache_onboard_bytes_total": "back", "trtllm_kv_cache_offload_bytes_total": "down"},
                units.BytesPerSecondSI,
            ),
            lines(
                "Memory",
                {
                    "trtllm_gpu_memory_usage_bytes": "GPU",
                    "trtllm_cpu_memory_usage_bytes": "host",
                    "trtllm_pinned_memory_usage_bytes": "pinned",
                },
                units.BytesIEC,
            ),
        ],
    ],
    is_rare=True,
)

BOARD = Board(
    "kv",
    "bireme: KV",
    "KV blocks, what prompts find in them, the tiers below the device, the events about them, and memory.",
    (NOW, BLOCKS, HITS, TIERS, EVENTS, MEMORY, TRTLLM),
)
