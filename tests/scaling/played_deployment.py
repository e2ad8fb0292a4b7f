"""A deployment as a connector shows it, whose figures a test sets: what its metrics say is text, as on a real page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bireme.errors import UnavailableError
from bireme.scaling.connector import Sizes, SourcePage, StageSize

STARTED_AT = 1_000_000.0


class PlayedDeployment:
    """Connector. It does what it is told at the next `pass_s`, but for stages that are `stuck`."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.now, self.clock = STARTED_AT, 50.0
        self.counts = {"prefill": prefill, "decode": decode}
        self.asked = dict(self.counts)
        self.stuck: set[str] = set()
        self.ending: dict[str, int] = {}
        self.totals = dict.fromkeys(("requests", "prompt", "output", "cached", "ttft", "gaps"), 0.0)
        self.levels: dict[str, float] = {"active": 0, "waiting": 0, "running": 0, "kv_used": 0, "steps": 0}
        # Bucket's upper bound, s -> share of the requests up to it; {}: there is no such histogram
        self.ttft_s: dict[str, float] = {"0.25": 1.0, "0.5": 1.0, "1.0": 1.0, "+Inf": 1.0}
        self.mean_gap_s: dict[str, float] = {"0.025": 1.0, "0.05": 1.0, "+Inf": 1.0}
        self.failure = ""  # why metrics can't be read
        self.page_at: float | None = None  # as its clock says; None: the same as everybody's
        self.num_up: dict[str, int] = {}  # by metrics, where they contradict the sizes
        self.more = ""  # further lines of the page
        self.scaled: list[Mapping[str, int]] = []

    def serve(self, requests: int, seconds: float = 60.0, prompt: int = 1000, output: int = 100) -> None:
        """Let time pass, with so many requests."""
        self.pass_s(seconds)
        more = {"requests": 1, "prompt": prompt, "output": output, "ttft": 0.11, "gaps": 0.011 * output}
        for name, value in more.items():
            self.totals[name] += requests * value
        self.levels["steps"] += 10 * requests

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self.clock += seconds
        self.ending.clear()
        for stage, count in self.asked.items():
            if stage not in self.stuck or count < self.counts[stage]:
                self.counts[stage] = count

    def sizes(self) -> Sizes:
        return {
            stage: StageSize(count, max(self.asked[stage] - count, 0), self.ending.get(stage, 0))
            for stage, count in self.counts.items()
        }

    def pages(self) -> Sequence[SourcePage]:
        if self.failure:
            raise UnavailableError(self.failure)
        return [SourcePage("launch", self._text(), self.page_at if self.page_at is not None else self.now)]

    def scale(self, wanted: Mapping[str, int]) -> list[str]:
        self.scaled.append(wanted)
        for stage, count in wanted.items():
            self.ending[stage] = max(self.counts[stage] - count, 0)
        self.asked = dict(wanted)
        return [f"{stage} {count}" for stage, count in wanted.items()]

    def _text(self) -> str:
        totals, levels = self.totals, self.levels
        lines = [
            f'bireme_requests_total{{worker="frontend",outcome="stop"}} {totals["requests"]}',
            f'bireme_model_requests_active{{worker="frontend",model="m"}} {levels["active"]}',
            f'bireme_time_to_first_token_seconds_sum{{worker="frontend"}} {totals["ttft"]}',
            f'bireme_time_to_first_token_seconds_count{{worker="frontend"}} {totals["requests"]}',
            f'bireme_inter_token_latency_seconds_sum{{worker="frontend"}} {totals["gaps"]}',
            f'bireme_inter_token_latency_seconds_count{{worker="frontend"}} {totals["output"]}',
            *_buckets("time_to_first_token", self.ttft_s, totals["requests"]),
            *_buckets("time_per_output_token", self.mean_gap_s, totals["requests"]),
            f'bireme_prompt_tokens_sum{{worker="decode"}} {totals["prompt"]}',
            f'bireme_prompt_tokens_count{{worker="decode"}} {totals["requests"]}',
            f'bireme_completion_tokens_sum{{worker="decode"}} {totals["output"]}',
            f'bireme_cached_prompt_tokens_total{{worker="prefill"}} {totals["cached"]}',
        ]
        for stage, count in self.counts.items():
            for number in range(self.num_up.get(stage, count)):
                lines += self._worker(f"{stage}_{number}" if number else stage)
        return "\n".join([*lines, self.more])

    def _worker(self, name: str) -> list[str]:
        levels = self.levels
        values = {
            "engine_up": 1, "engine_asleep": 0, "requests_running": levels["running"],
            "requests_waiting": levels["waiting"], "kv_blocks_used": levels["kv_used"], "kv_blocks_total": 1000,
            "kv_block_tokens": 32, "engine_step_seconds_count": levels["steps"], "engine_max_num_tokens": 8192,
            "engine_max_batch_size": 256,
        }  # fmt: skip
        return [f'bireme_{series}{{worker="{name}"}} {value}' for series, value in values.items()]


def _buckets(name: str, shares: Mapping[str, float], count: float) -> list[str]:
    series = f"bireme_{name}_seconds_bucket"
    return [f'{series}{{worker="frontend",le="{bound}"}} {share * count}' for bound, share in shares.items()]
