"""A load out of metrics: lengths and a rate, where nobody kept a trace.

Of metrics pages (Triton's /metrics, Prometheus' text format) one tells lengths, and two with the seconds between them
the rate as well. A Prometheus server is asked for the last hours, and the busiest stretch counts. Lengths are those of
decode workers, who take each request once.
"""

from __future__ import annotations

import http.client
import json
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bireme.config import stage_of
from bireme.errors import ConfigError
from bireme.launch.series import samples

_SERIES = {
    "requests": "bireme_prompt_tokens_count",
    "prompt_tokens": "bireme_prompt_tokens_sum",
    "output_tokens": "bireme_completion_tokens_sum",
}
_CACHED = "bireme_cached_prompt_tokens_total"  # of whoever computes prompts
_DECODE = 'worker=~"decode(_[0-9]+)?"'
_PROMPTS = 'worker=~"(decode|prefill)(_[0-9]+)?"'
_MOST_BYTES = 64 << 20
_MOST_STRETCHES = 11_000  # points of a series, that Prometheus answers with
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    prompt_tokens: float  # of a request, in the mean
    output_tokens: float
    cached_tokens: float  # of its prompt, that caches had
    requests_per_s: float | None  # None: one page tells no rate
    said: str  # where it is from


def of_pages(paths: Sequence[str], apart_s: float | None) -> MeasuredLoad:
    """Read one page, or an earlier and a later one. Raises ConfigError and OSError."""
    if len(paths) > 2:
        raise ConfigError(f"--metrics: {len(paths)} pages; one, or an earlier and a later one")
    if len(paths) == 2 and apart_s is None:
        raise ConfigError("--metrics: two pages need --apart-s, the seconds between them")
    totals = [_totals(path) for path in paths]
    grown = {name: totals[-1][name] - (totals[0][name] if len(totals) > 1 else 0.0) for name in totals[-1]}
    if min(grown.values()) < 0:
        raise ConfigError(
            f"--metrics {paths[1]}: counters are below those of {paths[0]}; they began anew, or the order"
        )
    requests = grown["requests"]
    if requests < 1:
        raise ConfigError(f"--metrics {' '.join(paths)}: no request at a decode worker ({_SERIES['requests']})")
    return MeasuredLoad(
        grown["prompt_tokens"] / requests, grown["output_tokens"] / requests, grown["cached_tokens"] / requests,
        requests / apart_s if len(paths) == 2 and apart_s else None,
        f"{requests:,.0f} requests of {' to '.join(paths)}",
    )  # fmt: skip


def of_prometheus(address: str, hours: float, stretch_s: float, match: str = "") -> MeasuredLoad:
    """Ask a Prometheus server. `match`: more label matchers, as in `instance="a:8002"`. Raises ConfigError."""
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--prometheus {address}: an address begins with http:// or https://")
    num_stretches = hours * 3600 / stretch_s
    if not 1 <= num_stretches <= _MOST_STRETCHES:
        raise ConfigError(
            f"--hours {hours:g}, --stretch-s {stretch_s:g}: {num_stretches:.3g} stretches; Prometheus tells of 1 to"
            f" {_MOST_STRETCHES:,}"
        )
    print(f"advise: asking {address} for {hours:g} h", file=sys.stderr, flush=True)
    now = time.time()
    span, more = f"[{max(round(stretch_s), 1)}s]", f",{match}" if match else ""
    queries = {name: f"sum(increase({series}{{{_DECODE}{more}}}{span}))" for name, series in _SERIES.items()}
    queries["cached_tokens"] = f"sum(increase({_CACHED}{{{_PROMPTS}{more}}}{span}))"
    found = {
        name: _asked(address, query, now - hours * 3600 + stretch_s, now, stretch_s) for name, query in queries.items()
    }
    if not found["requests"]:
        raise ConfigError(
            f"--prometheus {address}: it has no {_SERIES['requests']} of a decode worker in {hours:g} h"
            f" ({queries['requests']}); have it scrape the launch's metrics port, or correct --match"
        )
    busiest = max(found["requests"], key=lambda at: found["requests"][at])
    requests = found["requests"][busiest]
    if requests < 1:
        raise ConfigError(
            f"--prometheus {address}: no request in {hours:g} h ({queries['requests']}); give more --hours"
        )
    prompt, output, cached = (
        found[name].get(busiest, 0.0) / requests for name in ("prompt_tokens", "output_tokens", "cached_tokens")
    )
    if not prompt or not output:
        raise ConfigError(f"--prometheus {address}: no lengths beside its requests ({queries['prompt_tokens']})")
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(busiest))
    return MeasuredLoad(prompt, output, cached, requests / stretch_s, f"the busiest {stretch_s:g} s, until {at}")


def _totals(path: str) -> dict[str, float]:
    found = dict.fromkeys((*_SERIES, "cached_tokens"), 0.0)
    by_series = {series: name for name, series in _SERIES.items()}
    try:
        text = Path(path).read_text(encoding="utf-8")
        for name, labels, value in samples(text):
            stage = stage_of(labels.get("worker", ""))
            if stage == "decode" and (total := by_series.get(name)) is not None:
                found[total] += value
            elif name == _CACHED and stage in ("decode", "prefill"):
                found["cached_tokens"] += value
    except ValueError as error:  # UnicodeDecodeError is one
        raise ConfigError(f"--metrics {path}: {error}; a page in Prometheus' text format is read") from error
    if not all(map(math.isfinite, found.values())):
        raise ConfigError(f"--metrics {path}: values that are not finite")
    return found


def _asked(address: str, query: str, begin: float, end: float, step_s: float) -> dict[float, float]:
    """Return values by time; an empty answer is one. Raises ConfigError."""
    ask = urllib.parse.urlencode({"query": query, "start": f"{begin:.3f}", "end": f"{end:.3f}", "step": f"{step_s:g}"})
    url = f"{address.rstrip('/')}/api/v1/query_range?{ask}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            tree = json.loads(reply.read(_MOST_BYTES))
        series = tree["data"]["result"]
        pairs = series[0]["values"] if series else []
        return {float(at): float(value) for at, value in pairs if math.isfinite(float(value))}
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode(errors="replace")
        remedy = "try again later" if error.code >= 500 else "is this a Prometheus server, and --match right?"
        raise ConfigError(
            f"--prometheus {address}: it answers {query} with HTTP {error.code}: {said}; {remedy}"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        raise ConfigError(
            f"--prometheus {address}: no answer of a Prometheus server ({error}); name the address of its web page, as"
            " in http://127.0.0.1:9090"
        ) from error
