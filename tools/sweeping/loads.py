"""The tools that make loads: what each is started with, and what its own export says."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bireme.config import CHECKOUT
from bireme.errors import ConfigError
from bireme.sizing.figures import BURST_GAP_S, Figures
from tools import clients
from tools.sweeping.matrix import Cell

_EXPORT = "profile_export_aiperf.json"
_RECORDS = "profile_export.jsonl"
_NUM_ERRORS = 3  # different ones, that are told


class LoadFailedError(Exception):
    """A load did not measure what it should; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    url: str  # of the OpenAI frontend, without /v1
    model: str
    tokenizer: str  # folder, or hub id


def is_made(load: str) -> bool:
    """Return whether `prepare` has little to do."""
    return load != "aiperf" or (clients.ENVIRONMENTS / "aiperf").exists()


def prepare(load: str) -> None:
    """See that a load can run; make the environment of one that has its own. Raises ConfigError."""
    if load == "bireme" and importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("bireme's load needs aiohttp, which is not installed; pip install aiohttp")
    if load == "aiperf":
        try:
            clients.environment("aiperf")
        except clients.NotInstalledError as error:
            raise ConfigError(f"aiperf can't be installed ({error}); --loads bireme goes without it") from error


def environment() -> dict[str, str]:
    """Return that of a load: with HF_HUB_OFFLINE aiperf takes no folder for a tokenizer."""
    return {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}


def command(cell: Cell, target: Target, folder: Path) -> list[str]:
    """`folder`: for what the tool writes."""
    return _aiperf(cell, target, folder) if cell.load == "aiperf" else _own(cell, target)


def _own(cell: Cell, target: Target) -> list[str]:
    pressure = ["--concurrency", str(cell.concurrency)] if cell.concurrency else ["--rate", str(cell.rate)]
    return [
        sys.executable, str(CHECKOUT / "tools" / "sweeping" / "own_load.py"),
        "--url", target.url, "--model", target.model, "--tokenizer", target.tokenizer, *pressure,
        "--input-tokens", str(cell.input_tokens), "--output-tokens", str(cell.output_tokens),
        "--requests", str(cell.requests), "--warmup", str(cell.warmup), "--seed", str(cell.seed),
    ]  # fmt: skip


def _aiperf(cell: Cell, target: Target, folder: Path) -> list[str]:
    """As published sweeps of TensorRT-LLM do: streamed chats, exact lengths, the end of text ignored.

    A prompt for each request: aiperf makes 100 else, and what comes again is found in the cache. Tokens are those that
    the server has counted, since a text that is read again can be other tokens.
    """
    program = clients.ENVIRONMENTS / "aiperf" / "bin" / "aiperf"
    pressure = ["--concurrency", str(cell.concurrency)]
    if not cell.concurrency:
        pressure = ["--request-rate", str(cell.rate), "--arrival-pattern", "poisson"]
    warmup = ["--warmup-request-count", str(cell.warmup)] if cell.warmup else []
    return [
        str(program), "profile", "--model", target.model, "--url", target.url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", target.tokenizer, *pressure, *warmup,
        "--isl", str(cell.input_tokens), "--isl-stddev", "0", "--osl", str(cell.output_tokens), "--osl-stddev", "0",
        "--request-count", str(cell.requests), "--num-dataset-entries", str(cell.requests + cell.warmup),
        "--random-seed", str(cell.seed), "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{cell.output_tokens}",
        "--extra-inputs", "skip_special_tokens:false",
        "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none", "--artifact-dir", str(folder),
    ]  # fmt: skip


def read(cell: Cell, folder: Path, stdout: str) -> tuple[Figures, str]:
    """Return what the load has measured, and the tool with its version. Raises LoadFailedError."""
    figures, tool = _read_aiperf(folder) if cell.load == "aiperf" else _read_own(stdout)
    if figures.requests < cell.requests:
        raise LoadFailedError(f"{figures.requests} of {cell.requests} requests were answered")
    return figures, tool


def _read_own(stdout: str) -> tuple[Figures, str]:
    try:
        told = json.loads(stdout.strip().splitlines()[-1])
        errors, tree = [str(one) for one in told["errors"]], told["figures"]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise LoadFailedError(f"it told nothing that can be read ({error})") from error
    if tree is None or errors:
        raise LoadFailedError(f"{'no' if tree is None else 'not every'} request was answered: {'; '.join(errors)}")
    return msgspec.convert(tree, Figures), f"bireme, {float(told['busy']):.0%} busy"


def _read_aiperf(folder: Path) -> tuple[Figures, str]:
    path = folder / _EXPORT
    try:
        export = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadFailedError(f"aiperf left no {_EXPORT} that can be read ({error})") from error
    return from_aiperf(export), f"aiperf {export.get('aiperf_version', '?')}"


def request_errors(folder: Path) -> str:
    """Return what aiperf's records say of requests that failed; "": none has, or there are no records."""
    try:
        lines = (folder / _RECORDS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found: dict[str, None] = {}
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(line)["error"]
            found[f"requests failed with {error['code']}: {str(error['message'])[:400]}"] = None
    return "; ".join(list(found)[:_NUM_ERRORS])


def from_aiperf(export: Mapping[str, Any]) -> Figures:
    """Raises LoadFailedError for one that lacks a figure, or has one that is no number."""
    if export.get("was_cancelled") or export.get("is_complete") is False:
        raise LoadFailedError("aiperf was cancelled before its end")
    if errors := export.get("error_summary"):
        raise LoadFailedError(f"aiperf met errors: {json.dumps(errors)[:500]}")

    def number(metric: str, statistic: str = "avg") -> float:
        block = export.get(metric)
        value = block.get(statistic) if isinstance(block, Mapping) else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise LoadFailedError(f"aiperf's export has no {metric}.{statistic} ({value!r})")
        return float(value)

    is_known = number("inter_token_latency", "p50") >= 1e3 * BURST_GAP_S

    def of_gaps(metric: str, statistic: str = "avg") -> float | None:
        found = number(metric, statistic)
        return found if is_known else None

    return Figures(
        requests=round(number("request_count")),
        failed=0,
        seconds=number("benchmark_duration"),
        input_tokens=number("input_sequence_length"),
        output_tokens=number("output_sequence_length"),
        tokens_per_s=number("output_token_throughput"),
        tokens_per_s_per_user=of_gaps("output_token_throughput_per_user"),
        tokens_per_s_per_user_p50=of_gaps("output_token_throughput_per_user", "p50"),
        ttft_p50_ms=number("time_to_first_token", "p50"),
        ttft_p90_ms=number("time_to_first_token", "p90"),
        ttft_p99_ms=number("time_to_first_token", "p99"),
        itl_p50_ms=of_gaps("inter_token_latency", "p50"),
        itl_p90_ms=of_gaps("inter_token_latency", "p90"),
        itl_p99_ms=of_gaps("inter_token_latency", "p99"),
        latency_p50_ms=number("request_latency", "p50"),
    )
