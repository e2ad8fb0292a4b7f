"""What an operator does to a launch that runs, and whether anything is under way that its end would lose."""

from __future__ import annotations

import http.client
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from bireme import __version__
from bireme.config import BusyRule, Recipe, stage_of
from bireme.discovery import live_settings, mirror_reports, plan_notes, run_folder
from bireme.discovery.live_settings import LogLevel, MirrorSettings
from bireme.discovery.plan_notes import PlanNote
from bireme.discovery.records import LaunchFacts, WorkerRecord
from bireme.errors import BiremeError, NotFoundError, RequestError, UnavailableError
from bireme.launch.console import Console
from bireme.launch.series import WorkerSeries, worker_series
from bireme.specs import PIPELINES

_PIPELINES = {spec.name for spec in PIPELINES}
_IDLE_S = 1.0  # without a request before a launch may be deleted: between two workers a request is with neither


class ConflictError(BiremeError):
    """What is asked for would harm as things are; it can be forced."""

    code = "FAILED_PRECONDITION"


class Launch(Protocol):
    """A deployment, as operations see it."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def folder(self) -> Path: ...

    @property
    def facts(self) -> LaunchFacts: ...

    def health(self) -> dict[str, Any]: ...

    def metrics_pages(self) -> Sequence[str]:
        """Return Triton's and the frontend's. Raises BiremeError, OSError, HTTPException."""

    def workers_elsewhere(self) -> Mapping[str, WorkerRecord]: ...

    def generation_shares(self) -> Mapping[int, float]: ...

    def is_drain_known(self) -> bool:
        """Return whether no other server sends anything new."""


class Operations:
    """Thread-safe, since all of it stands in the run folder but `_idle_since`."""

    def __init__(self, launch: Launch, console: Console) -> None:
        self._launch, self._console = launch, console
        self._idle_since = 0.0  # when it was first found drained and without requests; 0: it is not

    @property
    def _workers(self) -> list[str]:
        recipe = self._launch.recipe
        return [name for stage in recipe.workers for name in recipe.replicas(stage)]

    def drain(self, worker: str = "", *, force: bool = False) -> dict[str, Any]:
        """Have a worker, or with "" the server, take nothing new; what runs there ends. Raises NotFoundError,
        ConflictError.
        """
        if worker:
            self._check_known(worker)
            if not force:
                self._check_not_last(worker, "drain")
        run_folder.ask_drain(self._launch.folder, worker)
        self._tell("drain", worker or "all")
        return {"draining": worker or "all"}

    def undrain(self, worker: str = "") -> dict[str, Any]:
        """Raises NotFoundError."""
        if worker:
            self._check_known(worker)
        run_folder.ask_drain(self._launch.folder, worker, undo=True)
        self._tell("undrain", worker or "all")
        return {"takes_requests": worker or "all"}

    def sleep(self, worker: str, *, free_weights: bool = False, force: bool = False) -> dict[str, Any]:
        """Have its engine end once its requests have. Raises NotFoundError, ConflictError."""
        self._check_known(worker)
        if not force:
            self._check_not_last(worker, "sleep")
        run_folder.ask_sleep(self._launch.folder, worker, free_weights=free_weights)
        self._tell("sleep", worker)
        return {"sleeps": worker}

    def wake(self, worker: str) -> dict[str, Any]:
        """Raises NotFoundError for one that does not sleep."""
        self._check_known(worker)
        if not run_folder.wake(self._launch.folder, worker):
            raise NotFoundError(f"worker: {worker} does not sleep")
        self._tell("wake", worker)
        return {"wakes": worker}

    def set_log_level(self, level: LogLevel | None) -> dict[str, Any]:
        """Of all processes of the launch; None: as serve.py was started with."""
        self._write(log_level=level)
        self._console.set_level(level)
        self._tell("log_level", level)
        return {"log_level": level}

    def set_busy(self, rules: tuple[BusyRule, ...] | None) -> dict[str, Any]:
        """In place of the recipe's router.busy, which None brings back. Raises RequestError."""
        if rules and not self._launch.recipe.has_load_routing:
            raise RequestError(
                "busy: engines of this recipe tell no load, as router.mode needs none; serve it with router.mode kv or"
                " least_loaded, or with a rule in router.busy"
            )
        for at, rule in enumerate(rules or ()):
            if rule.max_kv_usage is None and rule.max_waiting_tokens is None:
                raise RequestError(f"busy[{at}]: no bound; set max_kv_usage, max_waiting_tokens or both")
        self._write(busy=rules)
        self._tell("busy", rules)
        return {"busy": rules}

    def set_weight(self, weight: float | None) -> dict[str, Any]:
        """Its generation's share of new requests; None: as started."""
        self._write(weight=weight)
        self._tell("weight", weight)
        return {"generation": self._launch.facts.generation, "weight": self._weight}

    def set_mirror(
        self, url: str | None, share: float, key_file: str, generation: int | None, ca_file: str = ""
    ) -> dict[str, Any]:
        """Have the frontend send copies of a share of its requests to another one, and compare anew; None: no more.

        Raises RequestError.
        """
        settings = None
        if url is not None:
            _check_url(url)
            if key_file:
                _check_key_file(key_file)
            if ca_file:
                _check_ca_file(ca_file)
            settings = MirrorSettings(
                url=url, share=share, key_file=key_file, ca_file=ca_file, generation=generation,
                run=secrets.token_hex(8),
            )  # fmt: skip
        self._write(mirror=settings)
        mirror_reports.clear(self._launch.folder)
        self._tell("mirror", f"{url} share={share:g}" if url else None)
        return {"mirror": url, "share": share if url else 0}

    def note_plan(self, note: PlanNote) -> dict[str, Any]:
        """For the live view. Raises UnavailableError."""
        try:
            plan_notes.add(self._launch.folder, note)
        except OSError as error:
            raise UnavailableError(f"the run folder can't be written: {error}") from error
        return {"noted": note.result}

    @property
    def _weight(self) -> float:
        return live_settings.weight(self._launch.facts.weight)

    def status(self) -> dict[str, Any]:
        """Return what is under way, and whether the launch may be ended without a loss."""
        launch, health = self._launch, self._launch.health()
        is_draining = run_folder.is_draining(launch.folder)
        try:
            figures = _Figures(launch.metrics_pages(), self._workers)
            reasons = figures.reasons()
        except (BiremeError, OSError, http.client.HTTPException) as error:
            figures = _Figures((), self._workers)
            reasons = [f"what is under way can't be told: {error}"]
        if not is_draining:
            reasons.insert(0, "it takes new requests; drain it first")
        elif not launch.is_drain_known():
            reasons.insert(0, "other servers have not seen yet that it drains")
        reasons += self._wait_idle(bool(reasons))
        live = live_settings.current()
        return {
            "model": launch.recipe.served_name,
            "recipe": launch.recipe.name,
            "version": __version__,
            "generation": launch.facts.generation,
            "weight": self._weight,
            "status": health["status"],
            "draining": is_draining,
            "in_flight_requests": figures.num_requests,
            "requests": {"served": figures.num_served, "failed": figures.num_failed},
            "shares": {str(one): round(share, 3) for one, share in launch.generation_shares().items()},
            "elsewhere": Counter(str(one.generation) for one in launch.workers_elsewhere().values()),
            "leases": int(sum(one.leases for one in figures.workers.values())),
            "transfers": int(sum(one.transfers for one in figures.workers.values())),
            "safe_to_delete": not reasons,
            "reasons": reasons,
            "workers": {name: self._worker(name, one, health) for name, one in figures.workers.items()},
            "live_settings": msgspec.to_builtins(live),
            "mirror": live.mirror and mirror_reports.summary(launch.folder, live.mirror),
        }

    def pages(self) -> dict[str, Any]:
        """Raises UnavailableError."""
        try:
            return {"at": time.time(), "pages": list(self._launch.metrics_pages())}
        except (BiremeError, OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"metrics can't be read: {error}") from error

    def _worker(self, name: str, series: WorkerSeries, health: dict[str, Any]) -> dict[str, Any]:
        state = health.get("workers", {}).get(name, {}).get("reason", health["status"]) or "ready"
        if state == "ready" and run_folder.is_draining(self._launch.folder, name):
            state = "draining"
        requests, leases, transfers = int(series.queued), int(series.leases), int(series.transfers)
        return {"state": state, "in_flight_requests": requests, "leases": leases, "transfers": transfers}

    def _wait_idle(self, is_busy: bool) -> list[str]:
        now = time.monotonic()
        self._idle_since = 0.0 if is_busy else self._idle_since or now
        if is_busy or now - self._idle_since >= _IDLE_S:
            return []
        return [f"it has been idle for {now - self._idle_since:.1f} s; ask again, {_IDLE_S:g} s are enough"]

    def _check_known(self, worker: str) -> None:
        if worker not in self._workers:
            raise NotFoundError(f"worker: no {worker[:100]!r} here; this launch has {', '.join(self._workers)}")

    def _check_not_last(self, worker: str, what: str) -> None:
        launch, stage = self._launch, stage_of(worker)
        if stage == "prefill" and not launch.recipe.pipeline.enforce_disaggregation:
            return  # decode does its work
        health = launch.health().get("workers", {})
        own = (name for name in self._workers if name != worker and stage_of(name) == stage)
        ready = [
            name
            for name in own
            if health.get(name, {}).get("ready") and not run_folder.is_draining(launch.folder, name)
        ]
        ready += [
            name for name, one in launch.workers_elsewhere().items() if one.stage == stage and not one.is_draining
        ]
        if not ready:
            raise ConflictError(
                f"worker: {worker} is the last of {stage} that takes requests, so {what} would refuse all;"
                " wake or undrain another first, drain the server (no worker) to end it, or send force"
            )

    def _write(self, **changes: Any) -> None:
        live_settings.look(self._launch.folder)
        live_settings.write(self._launch.folder, msgspec.structs.replace(live_settings.current(), **changes))
        live_settings.look(self._launch.folder)

    def _tell(self, what: str, value: object) -> None:
        self._console.event("operator_asked", what=what, value=value)


def _check_url(url: str) -> None:
    """Raises RequestError."""
    try:
        parts = urlsplit(url)
        is_address = bool(parts.hostname and parts.port) and parts.scheme in ("http", "https")
        has_more = bool(parts.path.strip("/") or parts.query or parts.fragment) or "@" in parts.netloc
    except ValueError:
        is_address = has_more = False
    if not is_address or has_more:
        raise RequestError(
            f"url: {url[:100]!r}; send http://host:port or https://host:port of the other launch's frontend"
        )


def _check_key_file(name: str) -> None:
    """Raises RequestError."""
    try:
        key = Path(name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"key_file: {name[:200]} can't be read on this host ({error})") from error
    if not key.isascii() or len(key.split()) != 1:
        raise RequestError(f"key_file: {name[:200]}: one line with an API key of the other launch belongs there")


def _check_ca_file(name: str) -> None:
    """Raises RequestError."""
    try:
        ssl.create_default_context(cafile=name)
    except OSError as error:  # ssl.SSLError is one
        raise RequestError(f"ca_file: {name[:200]} can't be read as certificates on this host ({error})") from error


class _Figures:
    """What metrics pages say of what is under way."""

    def __init__(self, pages: Sequence[str], workers: Sequence[str]) -> None:
        series: dict[str, WorkerSeries] = {}
        for page in pages:
            series |= worker_series(page)
        self.workers = {name: series.get(name, WorkerSeries()) for name in workers}
        of_pipelines = sum(one.streams for name, one in series.items() if stage_of(name) in _PIPELINES)
        of_frontend = sum(one.active - 1 for one in series.values() if one.active)  # less the one for its page
        at_entries = of_pipelines + of_frontend
        # Requests of other servers' entries are with the engines alone, those between two engines with entries alone.
        self.num_served = int(sum(one.served for one in series.values()))
        self.num_failed = int(sum(one.failed for one in series.values()))
        self.num_requests = int(max(at_entries, sum(one.queued for one in self.workers.values())))

    def reasons(self) -> list[str]:
        num_leases = int(sum(one.leases for one in self.workers.values()))
        found = [f"{self.num_requests} requests are under way"] if self.num_requests else []
        return found + ([f"{num_leases} leases of KV have not ended"] if num_leases else [])
