"""The workers of a Service's pods: the API server says which pods there are, each pod itself which workers it has.

A thread a pod waits for its answer, which comes when something changes (record_page.py). While the API server can't be
reached the pods that are known are asked on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from bireme.child_process import Backoff
from bireme.discovery.endpoint_slices import ApiError, EndpointSlices, Pod
from bireme.discovery.record_page import OWN_PATH, PageClient, RecordPage
from bireme.discovery.store import StoreError
from bireme.errors import drop_frames
from bireme.settings import DiscoveryConfig

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_API_PAUSE_S = 10.0  # at most: all pods of a cluster ask an API server that is back
_PACE_S = 0.05  # between two looks at a pod whose records change without end
logger = logging.getLogger("bireme.discovery")


class Pods:
    """`start` once, `close` once."""

    def __init__(self, config: DiscoveryConfig) -> None:
        """Raises ConfigError outside of a cluster."""
        self._slices, self._lease_s = EndpointSlices(config), config.lease_s
        self._own: tuple[str, int] | None = None
        self._asked: dict[str, _AskedPod] = {}
        self._changed = threading.Condition()
        self._changes = 0
        self._seen = 0
        self._problem, self._is_listed, self._is_known = "not read yet", False, False
        self._closing = threading.Event()

    def start(self, own: tuple[str, int] | None = None) -> None:
        """`own`: the address that is not asked."""
        self._own = own
        threading.Thread(target=self._run, name="pods", daemon=True).start()

    def page(self) -> RecordPage:
        with self._changed:
            self._seen, asked, problem = self._changes, list(self._asked.values()), self._problem
        # Known once each pod has answered, or has failed to: else a deployment would look empty at first.
        self._is_known = self._is_known or self._is_listed and all(one.was_asked for one in asked)
        if not self._is_known:
            return RecordPage(problem=problem or "its pods have not all been asked yet")
        return RecordPage(tuple(blob for one in asked for blob in one.records()), problem)

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._changes != self._seen or self._closing.is_set(), timeout_s)

    def close(self) -> None:
        self._closing.set()
        self._slices.close()
        with self._changed:
            asked = list(self._asked.values())
        for one in asked:
            one.close()
        self._note_change()

    def _run(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _API_PAUSE_S)
        while not self._closing.is_set():
            try:
                for pods in self._slices.follow():
                    self._take(pods)
                    backoff.reset()
            except StoreError as error:
                self._note_problem(str(error))
                drop_frames(error)
                least_s = error.retry_after_s if isinstance(error, ApiError) else 0.0
                self._closing.wait(max(least_s, backoff.next_s()))
            except Exception as error:
                logger.exception("discovery_failed")
                self._note_problem(f"{type(error).__name__}: {error}")
                self._closing.wait(_API_PAUSE_S)

    def _take(self, pods: Mapping[str, Pod]) -> None:
        with self._changed:
            asked = {name: one for name, one in self._asked.items() if not one.has_ended}
            for name, one in asked.items():
                one.set_pod(pods.get(name))
            for name in pods.keys() - asked.keys() if not self._closing.is_set() else ():
                if self._own is None or self._own not in (
                    (address, pods[name].port) for address in pods[name].addresses
                ):
                    asked[name] = _AskedPod(pods[name], self._lease_s, self._note_change)
            self._asked, self._problem, self._is_listed = asked, "", True
        self._note_change()

    def _note_problem(self, problem: str) -> None:
        with self._changed:
            self._problem = problem
        self._note_change()

    def _note_change(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()


class _AskedPod:
    """Asks a pod until it has left the Service for a lease: one that moves between slices is in none for a moment."""

    def __init__(self, pod: Pod, lease_s: float, on_change: Callable[[], None]) -> None:
        self._pod, self._lease_s, self._on_change = pod, lease_s, on_change
        self._left_at = 0.0
        self._heard_at = 0.0
        self._workers: tuple[msgspec.Raw, ...] = ()
        self._problem = ""
        self._client: PageClient | None = None
        self._closing = threading.Event()
        self.was_asked = self.has_ended = False
        threading.Thread(target=self._run, name="pod", daemon=True).start()

    def records(self) -> tuple[msgspec.Raw, ...]:
        """Return what it said last; nothing once it has been silent for a lease."""
        is_alive = not self.has_ended and time.monotonic() - self._heard_at <= self._lease_s
        return self._workers if is_alive else ()

    def set_pod(self, pod: Pod | None) -> None:
        """None: it has left."""
        if pod is not None:
            self._pod, self._left_at = pod, 0.0
        elif not self._left_at:
            self._left_at = time.monotonic()

    def close(self) -> None:
        self._closing.set()
        if (client := self._client) is not None:
            client.close()

    def _run(self) -> None:
        backoff, turn = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), 0
        while not self._closing.is_set() and not self._is_gone():
            pod = self._pod
            client = self._client = PageClient(pod.addresses[turn % len(pod.addresses)], pod.port, OWN_PATH)
            try:
                self._follow(client, pod, backoff)
            except StoreError as error:
                self._note_problem(str(error))
                drop_frames(error)
                turn += 1
                self._closing.wait(backoff.next_s())
            except Exception:
                logger.exception("discovery_failed")
                self._closing.wait(_LONGEST_PAUSE_S)
            self.was_asked = True
        self.has_ended = True
        self._on_change()

    def _follow(self, client: PageClient, pod: Pod, backoff: Backoff) -> None:
        """Return when the pod has another address, or has left. Raises StoreError."""
        while not self._closing.wait(_PACE_S) and self._pod == pod and not self._is_gone():
            has_changed = client.look(self._lease_s / 3)
            backoff.reset()
            self._heard_at, self._workers, self._problem = time.monotonic(), client.page().workers or (), ""
            if has_changed or not self.was_asked:
                self.was_asked = True
                self._on_change()

    def _is_gone(self) -> bool:
        return bool(self._left_at) and time.monotonic() - self._left_at > self._lease_s

    def _note_problem(self, problem: str) -> None:
        if self._problem != problem:
            logger.warning("pod_silent pod=%s reason=%s", self._pod.name, problem)
        self._problem = problem
        if not self.was_asked:
            self.was_asked = True
            self._on_change()
