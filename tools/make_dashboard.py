"""Write the Grafana dashboard, docker/grafana/dashboards/bireme.json, from the table of metrics.

    python tools/make_dashboard.py             write it
    python tools/make_dashboard.py --check     exit with 1 when the file is not what would be written

A panel names metrics; bireme/metrics.py says whether one is a counter (drawn as a rate), a gauge or a histogram
(drawn as quantiles). A name that is not in the table fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT
from bireme.metrics import TABLE

DASHBOARD = CHECKOUT / "docker" / "grafana" / "dashboards" / "bireme.json"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
QUANTILES = (0.5, 0.95, 0.99)
COLUMNS, WIDTH, HEIGHT = 3, 8, 8  # a row of Grafana is 24 units wide
RATE = "[$__rate_interval]"
FILTER = '{worker=~"$worker"}'


@dataclass(frozen=True)
class Panel:
    """A graph of metrics, or of one expression over them."""

    title: str
    metrics: tuple[str, ...] = ()
    unit: str = "short"
    expression: str = ""  # instead of metrics; its metrics are checked, too
    by: tuple[str, ...] = ("worker",)


def ratio(part: str, whole: str) -> str:
    """One counter's share of another; of two gauges, the one in the other."""
    if TABLE[whole].kind == "counter":
        return f"sum by (worker) (rate({part}{FILTER}{RATE})) / sum by (worker) (rate({whole}{FILTER}{RATE}))"
    return f"sum by (worker) ({part}{FILTER}) / sum by (worker) ({whole}{FILTER})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Traffic": (
        Panel("Requests by outcome", ("bireme_requests_total",), "reqps", by=("worker", "outcome")),
        Panel("Requests in the engines", ("bireme_requests_running", "bireme_requests_waiting")),
        Panel("Tokens", ("bireme_generated_tokens_total", "bireme_prompt_tokens_total"), "short"),
        Panel("HTTP requests", ("bireme_http_requests_total",), "reqps", by=("path", "status")),
        Panel("Streams and subscriptions", ("bireme_streams", "bireme_bus_subscriptions")),
        Panel(
            "Cancelled, migrated, rate-limited, dropped",
            ("bireme_cancellations_total", "bireme_migrations_total", "bireme_rate_limited_total",
             "bireme_bus_dropped_total"),
            "reqps",
        ),
    ),
    "Latency": (
        Panel("Time to first token", ("bireme_time_to_first_token_seconds",), "s"),
        Panel("Gap between deliveries of a stream", ("bireme_inter_token_latency_seconds",), "s"),
        Panel("Queue", ("bireme_queue_seconds",), "s"),
        Panel("Whole request", ("bireme_request_seconds",), "s"),
        Panel("Engine step", ("bireme_engine_step_seconds",), "s"),
        Panel("Tokens of a request", ("bireme_prompt_tokens", "bireme_completion_tokens")),
    ),
    "KV cache": (
        Panel(
            "Blocks in use", unit="percentunit", expression=ratio("bireme_kv_blocks_used", "bireme_kv_blocks_total")
        ),
        Panel("Blocks kept for reuse", ("bireme_kv_blocks_cached",)),
        Panel(
            "Prompt tokens from reuse",
            unit="percentunit",
            expression=ratio("bireme_cached_prompt_tokens_total", "bireme_prompt_tokens_total"),
        ),
        Panel("Preemptions", ("bireme_preemptions_total",), "ops"),
        Panel("Prompt tokens found, by tier", ("bireme_kv_hit_rate",), "percentunit", by=("worker", "tier")),
        Panel("Blocks copied down", ("bireme_kv_offloaded_blocks_total",), "ops", by=("worker", "tier")),
        Panel("Blocks that came back", ("bireme_kv_onboarded_blocks_total",), "ops", by=("worker", "tier")),
        Panel(
            "Blocks lost to a tier",
            ("bireme_kv_offload_missed_blocks_total", "bireme_kv_tier_failures_total"),
            "ops",
            by=("worker", "tier"),
        ),
        Panel("KV events", ("bireme_kv_events_total",), "ops", by=("worker", "type")),
        Panel("KV events lost", ("bireme_kv_event_gaps_total",), "ops"),
    ),
    "Routing": (
        Panel("Placements by worker", ("bireme_routed_total",), "reqps", by=("target",)),
        Panel("Placements by reason", ("bireme_routing_decisions_total",), "reqps", by=("worker", "reason")),
        Panel("Who computes prompts", ("bireme_prompts_placed_total",), "reqps", by=("worker", "stage")),
        Panel(
            "Prompt tokens found in caches",
            unit="percentunit",
            expression=ratio("bireme_router_cached_tokens_total", "bireme_router_prompt_tokens_total"),
        ),
        Panel(
            "Cached tokens mispredicted, of prompt tokens",
            unit="percentunit",
            expression=ratio("bireme_router_mispredicted_tokens_total", "bireme_router_prompt_tokens_total"),
        ),
        Panel("Prediction error of a request", ("bireme_router_prediction_error_tokens",)),
        Panel("Blocks in the index", ("bireme_router_index_blocks", "bireme_router_index_memberships")),
        Panel("Age of KV events", ("bireme_kv_feed_lag_seconds",), "s"),
        Panel("Event gaps and resyncs", ("bireme_kv_feed_gaps_total", "bireme_kv_feed_resyncs_total"), "ops"),
        Panel("Old views of who serves", ("bireme_discovery_stale",), by=("worker", "model")),
    ),
    "Disaggregation": (
        Panel("Transferred", ("bireme_kv_transfer_bytes_total",), "Bps", by=("worker", "direction")),
        Panel("One transfer", ("bireme_kv_transfer_seconds",), "s"),
        Panel("Failed transfers", ("bireme_kv_transfer_failures_total",), "ops", by=("worker", "cause")),
        Panel("Leases", ("bireme_kv_leases",), by=("worker", "state")),
        Panel("Leases that nobody claimed", ("bireme_kv_leases_expired_total",), "ops"),
        Panel("Transfer buffer", ("bireme_kv_transfer_buffer_bytes",), "bytes"),
    ),
    "Engines": (
        Panel("Engines up", ("bireme_engine_up",)),
        Panel("Restarts", ("bireme_engine_restarts_total",), "ops", by=("worker", "cause")),
        Panel("Load time", ("bireme_engine_load_seconds",), "s"),
        Panel("Pictures encoded", ("bireme_images_encoded_total",), "ops"),
        Panel(
            "Embeddings from the cache", ("bireme_embedding_cache_hits_total", "bireme_embedding_cache_misses_total"),
            "ops",
        ),
        Panel("Denoising steps", ("bireme_video_steps_total",), "ops"),
    ),
    "TensorRT-LLM": (
        Panel("KV cache in use", ("trtllm_kv_cache_utilization",), "percentunit"),
        Panel("KV cache hits", ("trtllm_kv_cache_hit_rate",), "percentunit"),
        Panel("Requests", ("trtllm_num_requests_running", "trtllm_num_requests_waiting")),
        Panel("Iteration", ("trtllm_iteration_latency_seconds",), "s"),
        Panel("Time to first token", ("trtllm_time_to_first_token_seconds",), "s"),
        Panel("Tokens a step with drafts", ("trtllm_spec_decode_acceptance_length",)),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the whole document."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(row_of(title, len(panels) + 1, top))
        top += 1
        for index, panel in enumerate(row):
            line, column = divmod(index, COLUMNS)
            panels.append(graph_of(panel, len(panels) + 1, column * WIDTH, top + line * HEIGHT))
        top += HEIGHT * -(-len(row) // COLUMNS)
    return {
        "uid": "bireme",
        "title": "bireme",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [worker_variable()]},
        "panels": panels,
    }


def worker_variable() -> dict[str, Any]:
    query = "label_values(bireme_requests_total, worker)"
    return {
        "name": "worker", "label": "Worker", "type": "query", "datasource": SOURCE, "query": query, "refresh": 2,
        "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def row_of(title: str, number: int, top: int) -> dict[str, Any]:
    return {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}, "panels": []}


def graph_of(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    targets = targets_of(panel)
    for index, target in enumerate(targets):
        target["refId"] = chr(ord("A") + index)
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": " ".join(TABLE[name].help for name in panel.metrics),
        "datasource": SOURCE,
        "gridPos": {"x": left, "y": top, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def targets_of(panel: Panel) -> list[dict[str, Any]]:
    if panel.expression:
        return [target(panel.expression, "{{worker}}")]
    return [one for name in panel.metrics for one in targets_of_metric(panel, name)]


def targets_of_metric(panel: Panel, name: str) -> list[dict[str, Any]]:
    """A counter's rate, a gauge, or a histogram's quantiles; the legend says what the title doesn't."""
    spec = TABLE[name]
    several = f"{short(name)} " if len(panel.metrics) > 1 else ""
    by = [label for label in panel.by if label in spec.labels]
    legend = several + " ".join("{{" + label + "}}" for label in by)
    if spec.kind == "histogram":
        rate = f"sum by (le, worker) (rate({name}_bucket{FILTER}{RATE}))"
        return [
            target(f"histogram_quantile({quantile}, {rate})", f"{legend} p{quantile * 100:g}") for quantile in QUANTILES
        ]
    inner = f"rate({name}{FILTER}{RATE})" if spec.kind == "counter" else f"{name}{FILTER}"
    return [target(f"sum by ({', '.join(by)}) ({inner})", legend)]


def short(name: str) -> str:
    return name.removeprefix("bireme_").removeprefix("trtllm_").removesuffix("_total")


def target(expression: str, legend: str) -> dict[str, Any]:
    return {"datasource": SOURCE, "expr": expression, "legendFormat": legend.strip(), "refId": ""}


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        return 0 if DASHBOARD.exists() and DASHBOARD.read_text() == text() else 1
    DASHBOARD.parent.mkdir(parents=True, exist_ok=True)
    DASHBOARD.write_text(text())
    print(f"wrote {DASHBOARD.relative_to(CHECKOUT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
