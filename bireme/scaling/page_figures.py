"""A metrics page as a planner reads it: totals since its processes began, and levels of its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from bireme.config import stage_of
from bireme.launch.series import samples
from bireme.scaling.connector import STAGES
from bireme.specs import CHAT, COMPLETION, GENERATE, TENSORRT_LLM_BLS

_ENTRIES = {"frontend", *(spec.name for spec in (GENERATE, COMPLETION, CHAT, TENSORRT_LLM_BLS))}
# What entries and stages count: series -> the total below.
_AT_ENTRIES = {
    "bireme_requests_total": "ended",
    "bireme_time_to_first_token_seconds_sum": "ttft_s",
    "bireme_time_to_first_token_seconds_count": "num_ttft",
    "bireme_inter_token_latency_seconds_sum": "gaps_s",
    "bireme_inter_token_latency_seconds_count": "num_gaps",
}
_AT_STAGES = {
    ("decode", "bireme_prompt_tokens_sum"): "prompt_tokens",
    ("decode", "bireme_prompt_tokens_count"): "num_prompts",
    ("decode", "bireme_completion_tokens_sum"): "output_tokens",
    ("prefill", "bireme_cached_prompt_tokens_total"): "cached_tokens",
    ("decode", "bireme_cached_prompt_tokens_total"): "decode_cached_tokens",  # where it computes prompts itself
}
_ACTIVE = {"frontend": "bireme_model_requests_active"}  # of an entry; a pipeline's:
_STREAMS = "bireme_streams"
_LEVELS = {
    "bireme_engine_up": "up",
    "bireme_engine_asleep": "asleep",
    "bireme_requests_running": "running",
    "bireme_requests_waiting": "waiting",
    "bireme_kv_blocks_used": "kv_used",
    "bireme_kv_blocks_total": "kv_blocks",
    "bireme_kv_block_tokens": "block_tokens",
    "bireme_engine_step_seconds_count": "steps",
    "bireme_engine_max_num_tokens": "max_num_tokens",
    "bireme_engine_max_batch_size": "max_batch_size",
}
TOTALS = (*_AT_ENTRIES.values(), *_AT_STAGES.values())
TTFT, MEAN_GAP = "bireme_time_to_first_token_seconds", "bireme_time_per_output_token_seconds"  # of each request
_BUCKETS = {f"{name}_bucket": name for name in (TTFT, MEAN_GAP)}


@dataclass(slots=True)
class WorkerLevels:
    """Of one worker. None: its page has no such series."""

    up: float | None = None
    asleep: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_used: float | None = None
    kv_blocks: float | None = None
    block_tokens: float | None = None
    steps: float | None = None  # so far
    max_num_tokens: float | None = None
    max_batch_size: float | None = None

    @property
    def is_up(self) -> bool:
        return bool(self.up) and not self.asleep

    @property
    def kv_usage(self) -> float | None:
        return self.kv_used / self.kv_blocks if self.kv_used is not None and self.kv_blocks else None


@dataclass(slots=True)
class PageFigures:
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))
    active: float = 0.0  # requests that entries work on now
    # Of entries: histogram -> bucket's upper bound, s -> requests up to it
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    workers: dict[str, WorkerLevels] = field(default_factory=dict)  # of prefill and decode


def page_figures(text: str) -> PageFigures:
    """Raises ValueError for a value that is no number."""
    found = PageFigures()
    for name, labels, value in samples(text):
        worker = labels.get("worker", "")
        stage = stage_of(worker)
        if stage in STAGES:
            levels = found.workers.setdefault(worker, WorkerLevels())
            if (level := _LEVELS.get(name)) is not None:
                setattr(levels, level, value)
            if (total := _AT_STAGES.get((stage, name))) is not None:
                found.totals[total] += value
        elif stage in _ENTRIES:
            if (total := _AT_ENTRIES.get(name)) is not None:
                found.totals[total] += value
            if (histogram := _BUCKETS.get(name)) is not None:
                counts = found.buckets.setdefault(histogram, {})
                bound = float(labels.get("le", "inf"))
                counts[bound] = counts.get(bound, 0.0) + value
            if name == _ACTIVE.get(stage, _STREAMS):
                found.active += value
    return found
