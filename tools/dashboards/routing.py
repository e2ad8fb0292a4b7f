"""Routing: who gets what and why, what the router believes to be cached, and what it hears of workers."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from tools.dashboards.panels import (
    TOKENS_A_SECOND,
    Board,
    Limits,
    Row,
    heatmap,
    lines,
    number,
    part,
    percentiles,
    rare,
)
from tools.dashboards.queries import ALL, by, level, rate, rest, share

NOT_REFUSED = 'reason!="refused"'
MISPREDICTED = Limits(0.05, 0.1)
LAG = Limits(1, 5)

NOW = Row(
    "Now",
    [
        [
            number("Placements", rate("bireme_routed_total", ALL), units.RequestsPerSecond),
            number(
                "Refused, all busy",
                rest("bireme_routing_decisions_total", "bireme_routing_decisions_total", ALL, NOT_REFUSED),
                units.PercentUnit,
                limits=Limits(0.01, 0.05),
            ),
            number(
                "Prompt tokens found",
                share("bireme_router_cached_tokens_total", "bireme_router_prompt_tokens_total", ALL),
                units.PercentUnit,
            ),
            number(
                "Mispredicted",
                share("bireme_router_mispredicted_tokens_total", "bireme_router_prompt_tokens_total", ALL),
                units.PercentUnit,
                limits=MISPREDICTED,
            ),
            number("Age of KV events", level("bireme_kv_feed_lag_seconds", ALL, "max"), units.Seconds, limits=LAG),
            number("Old views of who serves", level("bireme_discovery_stale", ALL), limits=Limits(0.5, 1)),
        ]
    ],
)

DECISIONS = Row(
    "Decisions",
    [
        [
            lines(
                "By reason",
                "bireme_routing_decisions_total",
                units.RequestsPerSecond,
                choice=by("reason"),
                shape="stacked",
            ),
            lines(
                "Who gets requests",
                "bireme_routed_total",
                units.RequestsPerSecond,
                choice=by("target"),
                shape="parts of all",
            ),
            lines(
                "Who computes prompts",
                "bireme_prompts_placed_total",
                units.RequestsPerSecond,
                choice=by("worker", "stage"),
            ),
        ],
        [
            lines(
                "Requests to each worker", "bireme_routed_total", units.RequestsPerSecond, choice=by("worker", "target")
            ),
            lines("Waiting in the engines", "bireme_requests_waiting"),
            lines("Running in the engines", "bireme_requests_running"),
            lines(
                "Share of each generation",
                "bireme_routed_generations_total",
                units.RequestsPerSecond,
                choice=by("generation"),
                shape="parts of all",
                note="Empty while one generation serves alone.",
            ),
        ],
    ],
)

PREDICTION = Row(
    "What was predicted, and found",
    [
        [
            lines(
                "Cached tokens of prompts",
                {
                    "bireme_router_prompt_tokens_total": "prompt",
                    "bireme_router_predicted_tokens_total": "predicted",
                    "bireme_router_cached_tokens_total": "found",
                },
                TOKENS_A_SECOND,
            ),
            part(
                "Prompt tokens found in caches",
                ("bireme_router_cached_tokens_total", "bireme_router_prompt_tokens_total"),
            ),
            part(
                "Mispredicted, of prompt tokens",
                ("bireme_router_mispredicted_tokens_total", "bireme_router_prompt_tokens_total"),
                limits=MISPREDICTED,
                top=None,
            ),
        ],
        [
            percentiles(
                "Error of a request's prediction, tokens", "bireme_router_prediction_error_tokens", units.Short
            ),
            heatmap("Error of predictions, tokens", "bireme_router_prediction_error_tokens", units.Short),
        ],
    ],
)

INDEX = Row(
    "Index",
    [
        [
            lines("Blocks known", "bireme_router_index_blocks"),
            lines("Holdings known", "bireme_router_index_memberships"),
            lines("Memory of the index", "bireme_router_index_bytes", units.BytesIEC),
        ],
    ],
)

FEED = Row(
    "What workers tell, and discovery",
    [
        [
            lines("Age of KV events", "bireme_kv_feed_lag_seconds", units.Seconds, combine="max", limits=LAG),
            rare(
                "Gaps and resyncs",
                {"bireme_kv_feed_gaps_total": "missed", "bireme_kv_feed_resyncs_total": "in step again"},
            ),
            rare("Messages left out", "bireme_kv_feed_discarded_total", choice=by("worker", "reason")),
        ],
        [
            rare("Events lost by engines", "bireme_kv_event_gaps_total"),
            lines(
                "Old views of who serves", "bireme_discovery_stale", choice=by("worker", "model"), combine="max", top=1
            ),
            rare("Migrations", "bireme_migrations_total"),
        ],
    ],
)

BOARD = Board(
    "routing",
    "bireme: routing",
    "Who gets requests and why, what the router believes to be cached against what was, and what it hears of workers.",
    (NOW, DECISIONS, PREDICTION, INDEX, FEED),
)
