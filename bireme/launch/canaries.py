"""Rounds of canaries over every path that a request can take, and the last result of each path.

Paths: pairings of prefill and decode workers (in turns), decode workers without prefill, embedding workers, pipelines,
the OpenAI frontend. One that has just served requests needs no canary.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bireme.config import Recipe
from bireme.errors import BiremeError
from bireme.launch import canary
from bireme.launch.canary import CanaryPrompt, CanaryResult
from bireme.launch.console import Console
from bireme.launch.series import WorkerSeries, total
from bireme.multimodal.model_config import picture_model_of

OPENAI = "openai"
Probe = Callable[[CanaryPrompt], CanaryResult]
_FEW_TOKENS = 2  # a prompt that costs no more than a decode step
_AGAIN_S = 1.0  # after a failure, so that readiness returns soon
_VIDEO_INTERVAL_S = 60.0  # a frame costs a GPU more than two tokens
_MAX_SILENCES = 3  # canaries in a row without an answer or any progress: the stub hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    interval_s: float = 4.0  # 0: no canaries
    timeout_s: float = 20.0


@dataclass(frozen=True, slots=True)
class OpenAITarget:
    address: str
    key: str  # the frontend takes it from its launcher
    has_tls: bool = False


@dataclass(slots=True)
class PathHealth:
    """Of a worker, a pipeline or the frontend."""

    result: CanaryResult | None = None  # None: none yet
    series: WorkerSeries | None = None  # at the last canary
    due_at: float = 0.0
    silences: int = 0  # in a row
    successes: int = 0
    logged: str = ""  # the error that was logged

    @property
    def is_ok(self) -> bool:
        return self.result is not None and self.result.is_ok

    @property
    def problem(self) -> str:
        return f"canary failed: {self.result.error}" if self.result and not self.result.is_ok else ""

    def take(self, result: CanaryResult) -> str:
        """Note a result; return the event to log, if any."""
        logged = self.logged
        if result.is_refused:  # whoever refuses, works
            self.result, self.silences = CanaryResult(), 0
            self.logged = "busy" if result.is_busy else result.error  # its text says each time when to try again
            return "canary_refused" if self.logged != logged else ""
        self.result, self.logged = result, result.error
        self.successes += result.is_ok
        self.silences = self.silences + 1 if result.is_silent else 0
        if result.is_ok:
            return "canary_succeeds_again" if logged else ""
        return "canary_failed" if result.error != logged else ""


class Canaries:
    """`turn`, on one thread, returns the seconds until the next; `problem` from any."""

    def __init__(
        self,
        http: str,
        recipe: Recipe,
        models: tuple[str, ...],
        openai: OpenAITarget | None,
        settings: CanarySettings,
        console: Console,
        *,
        series: Callable[[], Mapping[str, WorkerSeries]],
        is_down: Callable[[str], bool],
        on_hung: Callable[[str, str], None],
        key: str = "",
    ) -> None:
        """`is_down`: known without a canary; `on_hung`: gets model and reason; `key`: the deployment's."""
        self._http, self._recipe, self._openai, self._settings = http, recipe, openai, settings
        self._console = console
        self._series, self._is_down, self._on_hung, self._key = series, is_down, on_hung, key
        self._has_pictures = picture_model_of(recipe) is not None
        self._is_text = "decode" in recipe.workers
        self._paths = {name: probe for name, probe in self._probes().items() if name in (*models, OPENAI)}
        embedders = recipe.replicas("embedding")
        self._embedder_probes: dict[str, Probe] = {
            name: functools.partial(self._probe_embedder, name) for name in embedders
        }
        workers = (*recipe.replicas("prefill"), *recipe.replicas("decode"), *embedders)
        self._health = {name: PathHealth() for name in (*workers, *self._paths)}
        self._stubs = {name: recipe.instances(name) for name in self._health} | {"video": ("video_diffusion",)}
        self._prompt = None if self._is_text else CanaryPrompt("", (), key)
        self._num_rounds = 0
        self.is_stopping = False

    def problems(self) -> dict[str, str]:
        return {name: self.problem(name) for name in self._paths}

    def problem(self, name: str) -> str:
        """Why the last canary failed there; empty before the first."""
        health = self._health.get(name)
        return health.problem if health else ""

    def successes(self, name: str) -> int:
        return self._health[name].successes

    def turn(self) -> float:
        if (prompt := self._prompt or self._make_prompt()) is None:
            return _AGAIN_S
        for prefill, decode in self._pairs():
            self._probe_workers(prefill, decode, prompt)
        for name, probe in (self._embedder_probes | self._paths).items():
            if not self._is_down(name):
                self._probe_path(name, probe, prompt)
        self._num_rounds += 1
        interval_s = self._settings.interval_s
        return min(interval_s, _AGAIN_S) if any(health.problem for health in self._health.values()) else interval_s

    def _probes(self) -> dict[str, Probe]:
        http, timeout_s = self._http, self._settings.timeout_s
        found: dict[str, Probe] = {
            "completion": lambda prompt: canary.probe_text(http, "completion", prompt, timeout_s),
            "generate": lambda prompt: canary.probe_text(http, "generate", prompt, timeout_s),
            "chat": lambda prompt: canary.probe_chat(http, "chat", prompt, self._has_pictures, timeout_s),
            "video": lambda prompt: canary.probe_video(http, "video", timeout_s),
        }
        if (target := self._openai) is not None:
            found[OPENAI] = lambda prompt: self._probe_openai(target, prompt)
        return found

    def _probe_openai(self, target: OpenAITarget, prompt: CanaryPrompt) -> CanaryResult:
        model, timeout_s = self._recipe.served_name, self._settings.timeout_s
        if self._is_text:
            return canary.probe_openai(target.address, model, target.key, prompt, timeout_s, target.has_tls)
        if self._embedder_probes:
            return canary.probe_openai_embedding(target.address, model, target.key, prompt, timeout_s, target.has_tls)
        return canary.probe_ready(target.address, timeout_s, target.has_tls)

    def _probe_embedder(self, name: str, prompt: CanaryPrompt) -> CanaryResult:
        return canary.probe_embedding(self._http, name, prompt, self._settings.timeout_s)

    def _make_prompt(self) -> CanaryPrompt | None:
        """A block of KV and a token more where it moves, else a few tokens; None: the tokenizer can't now."""
        config, num_tokens = self._recipe.workers["decode"].engine_config.kv_cache_config, _FEW_TOKENS
        if "prefill" in self._recipe.workers:
            num_tokens = config.tokens_per_block + 1
        try:
            self._prompt = canary.make_prompt(self._http, "tokenizer", num_tokens, self._settings.timeout_s, self._key)
        except BiremeError as error:
            self._console.event("canary_prompt_failed", "warning", error=error)
        return self._prompt

    def _pairs(self) -> list[tuple[str, str]]:
        """Return (prefill, decode) with each worker; the next round has others."""
        prefills = [name for name in self._recipe.replicas("prefill") if not self._is_down(name)] or [""]
        decodes = [name for name in self._recipe.replicas("decode") if not self._is_down(name)]
        if not decodes:
            return []
        shift = self._num_rounds
        if len(prefills) > len(decodes):
            return [(prefill, decodes[(at + shift) % len(decodes)]) for at, prefill in enumerate(prefills)]
        return [(prefills[(at + shift) % len(prefills)], decode) for at, decode in enumerate(decodes)]

    def _probe_workers(self, prefill: str, decode: str, prompt: CanaryPrompt) -> None:
        if self.is_stopping:
            return
        health, series = self._health[decode], self._series().get(decode)
        last, health.series = health.series, series
        are_ok = all(self._health[name].is_ok for name in (prefill, decode) if name)
        if are_ok and _does_work(series, last, bool(prefill)):
            return
        timeout_s = self._settings.timeout_s
        if not prefill:
            self._take(decode, canary.probe_decode(self._http, decode, prompt, timeout_s))
            return
        found = canary.probe_pair(self._http, prefill, decode, prompt, timeout_s)
        self._take(prefill, found.prefill)
        if found.decode is not None:
            self._take(decode, found.decode)

    def _probe_path(self, name: str, probe: Probe, prompt: CanaryPrompt) -> None:
        health, is_video = self._health[name], name == "video"
        series = total(self._series(), self._stubs[name])
        if self.is_stopping or time.monotonic() < health.due_at:
            return
        if is_video and series is not None and series.queued:
            return  # one video at a time: it would wait for minutes
        last, health.series = health.series, series
        if health.is_ok and _has_served(series, last, is_video):
            return
        self._take(name, probe(prompt))
        if is_video and not health.problem:
            health.due_at = time.monotonic() + max(_VIDEO_INTERVAL_S, self._settings.interval_s)

    def _take(self, name: str, result: CanaryResult) -> None:
        if self.is_stopping or result.is_unreachable or self._is_down(name):
            return  # the end of a process says nothing of the path
        if result.is_silent and self._is_anybody_busy():
            return  # it queues behind others' work
        health = self._health[name]
        if event := health.take(result):
            if result.error:
                self._console.event(event, "warning", way=name, error=result.error)
            else:
                self._console.event(event, way=name)
        if health.silences >= _MAX_SILENCES:
            health.silences = 0
            self._on_hung(name, f"{_MAX_SILENCES} canaries without an answer")

    def _is_anybody_busy(self) -> bool:
        now = self._series()
        return any(
            series.queued and (old := self._health[name].series) is not None and series.steps != old.steps
            for name, series in now.items()
            if name in self._health
        )


def _does_work(series: WorkerSeries | None, last: WorkerSeries | None, has_prefill: bool) -> bool:
    """Whether a decode worker has since made steps, and imported KV."""
    if series is None or last is None or not series.queued or series.steps == last.steps:
        return False
    return not has_prefill or series.imported > last.imported


def _has_served(series: WorkerSeries | None, last: WorkerSeries | None, is_video: bool) -> bool:
    """Videos' canaries count as requests."""
    return series is not None and last is not None and series.served - last.served > is_video
