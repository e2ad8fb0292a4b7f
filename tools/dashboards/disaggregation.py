"""Disaggregation: prefill and decode side by side, and what passes between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from grafana_foundation_sdk.models import units

from tools.dashboards.panels import (
    KV_LIMITS,
    TOKENS_A_SECOND,
    Board,
    Panel,
    Row,
    heatmap,
    lines,
    number,
    part,
    percentiles,
    rare,
    ready,
)
from tools.dashboards.queries import Choice, by, mean, quantile, rate

PREFILL, DECODE = by("worker", where='worker=~"prefill.*"'), by("worker", where='worker=~"decode.*"')
ALL_PREFILL, ALL_DECODE = replace(PREFILL, by=()), replace(DECODE, by=())
IMPORTS = by(where='direction="import"')
IN_ENGINES = {"bireme_requests_running": "running", "bireme_requests_waiting": "waiting"}
PROMPT_TOKENS = {"bireme_prompt_tokens_total": "taken in", "bireme_cached_prompt_tokens_total": "reused"}
KV_USE = ("bireme_kv_blocks_used", "bireme_kv_blocks_total")


def _sides(make: Callable[[str, Choice], Panel]) -> list[Panel]:
    """The same panel of both sides, made from the side's name and the choice of its series."""
    return [make("Prefill", PREFILL), make("Decode", DECODE)]


NOW = Row(
    "Now",
    [
        [
            ready("Prefill ready", "bireme_engine_up", choice=ALL_PREFILL),
            ready("Decode ready", "bireme_engine_up", choice=ALL_DECODE),
            number("Prefill queue, p95", quantile(0.95, "bireme_queue_seconds", ALL_PREFILL), units.Seconds),
            number("Decode queue, p95", quantile(0.95, "bireme_queue_seconds", ALL_DECODE), units.Seconds),
            number("Transferred", rate("bireme_kv_transfer_bytes_total", IMPORTS), units.BytesPerSecondSI),
            number("One transfer, p95", quantile(0.95, "bireme_kv_transfer_seconds", IMPORTS), units.Seconds),
        ]
    ],
)

BOTH = Row(
    "Prefill and decode",
    [
        _sides(lambda side, choice: lines(f"{side}: requests", IN_ENGINES, choice=choice)),
        _sides(lambda side, choice: percentiles(f"{side}: queue", "bireme_queue_seconds", choice=choice)),
        _sides(lambda side, choice: percentiles(f"{side}: engine step", "bireme_engine_step_seconds", choice=choice)),
        _sides(lambda side, choice: part(f"{side}: KV blocks in use", KV_USE, choice=choice, limits=KV_LIMITS)),
        [
            lines("Prefill: prompt tokens", PROMPT_TOKENS, TOKENS_A_SECOND, choice=PREFILL),
            lines("Decode: generated tokens", "bireme_generated_tokens_total", TOKENS_A_SECOND, choice=DECODE),
        ],
        [
            percentiles("Prefill: time to first token", "bireme_time_to_first_token_seconds", choice=PREFILL),
            percentiles("Decode: gap between deliveries", "bireme_inter_token_latency_seconds", choice=DECODE),
        ],
    ],
)

TRANSFER = Row(
    "Transfers",
    [
        [
            lines("Bytes", "bireme_kv_transfer_bytes_total", units.BytesPerSecondSI, choice=by("worker", "direction")),
            percentiles("One transfer", "bireme_kv_transfer_seconds", choice=by("worker", "direction")),
            heatmap("One transfer, of the importers", "bireme_kv_transfer_seconds", choice=IMPORTS),
        ],
        [
            rare("Failed transfers", "bireme_kv_transfer_failures_total", choice=by("worker", "cause")),
            lines("Leases", "bireme_kv_leases", choice=by("worker", "state"), shape="stacked"),
            rare(
                "Leases that nobody claimed",
                "bireme_kv_leases_expired_total",
                note="Decode has no room in time: it needs more KV blocks or workers.",
            ),
        ],
        [
            lines("Transfer buffer in use", "bireme_kv_transfer_buffer_bytes", units.BytesIEC),
            lines(
                "Host memory that a GPU's KV passes through",
                "bireme_kv_staging_bytes",
                units.BytesIEC,
                choice=by("worker", "kind"),
            ),
            Panel("Mean transfer", (mean("bireme_kv_transfer_seconds", by("worker", "direction")),), units.Seconds),
        ],
    ],
)

PLACEMENT = Row(
    "Placement",
    [
        [
            lines(
                "Who computes prompts",
                "bireme_prompts_placed_total",
                units.RequestsPerSecond,
                choice=by("stage"),
                shape="parts of all",
            ),
            rare("Migrations", "bireme_migrations_total"),
            rare("Cancelled", "bireme_cancellations_total"),
        ],
    ],
)

BOARD = Board(
    "disaggregation",
    "bireme: disaggregation",
    "Prefill and decode side by side, the KV that passes between them, and who computes prompts.",
    (NOW, BOTH, TRANSFER, PLACEMENT),
)
