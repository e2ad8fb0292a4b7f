"""Triton's /metrics page as numbers."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

# What must be zero when nothing runs: a client that left must not leave anything behind.
IDLE_GAUGES = (
    "bireme_kv_blocks_used",
    "bireme_kv_leases",
    "bireme_requests_running",
    "bireme_requests_waiting",
    "bireme_streams",
)


def read_page(address: str, timeout_s: float = 10.0) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as page:
        text: str = page.read().decode()
        return text


def gauges(page: str, names: Iterable[str]) -> dict[str, float]:
    """Return `name{labels}` -> value of every series of these gauges."""
    wanted = set(names)
    return {
        f"{sample.name}{{{','.join(f'{key}={value}' for key, value in sorted(sample.labels.items()))}}}": sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name in wanted
    }


def left_behind(page: str) -> dict[str, float]:
    """Return the gauges of IDLE_GAUGES that are not zero."""
    return {series: value for series, value in gauges(page, IDLE_GAUGES).items() if value}
