"""What a launch tells other pods and its own processes of the workers that it knows (discovery/kubernetes.py).

A read asks for no proof: it gives addresses and capacities, as /health/ready of the same port does, and each record
carries the proof that its reader asks for. The network policy says who reaches the port.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from bireme.discovery.kubernetes import KubernetesStore, registered
from bireme.discovery.pods import Pods
from bireme.discovery.record_page import ALL_PATH, MAX_WAIT_S, OWN_PATH, RecordPage
from bireme.discovery.records import seal_record
from bireme.discovery.store import StoreError
from bireme.launch.guarded_thread import GuardedThread, GuardedThreads
from bireme.launch.health_server import Records
from bireme.launch.ports import is_every_address
from bireme.settings import DiscoveryConfig

_LOOK_S = 0.25  # from one look at the engines' folder to the next
_MAX_WAITING = 512  # answers, each with a thread
_WAIT = re.compile(r"wait=(\d{1,4})")


class ToldRecords:
    """`start`, `stop`. Itself the RecordSource of the launch's own view."""

    def __init__(self, config: DiscoveryConfig, key: bytes, folder: Path) -> None:
        """`folder`: the run folder. Raises ConfigError outside of a cluster."""
        self._config, self._key = config, key
        self._own = registered(config, key, folder)
        self._pods = Pods(config)
        self._thread: GuardedThread | None = None
        self._pages = {path: _Told(RecordPage(problem="not read yet")) for path in (OWN_PATH, ALL_PATH)}
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._is_stopping = False
        self.at = ""  # host:port by which the launch's processes reach it

    @property
    def routes(self) -> Mapping[str, Records]:
        return {path: self._route(path) for path in self._pages}

    def store(self) -> KubernetesStore:
        return KubernetesStore(self._config, self._key, self)

    def start(self, address: str, threads: GuardedThreads) -> None:
        """`address`: host:port of the health port."""
        host, _, port = address.rpartition(":")
        self.at = f"127.0.0.1:{port}" if is_every_address(host.strip("[]")) else address
        self._pods.start((host.strip("[]"), int(port)))
        self._thread = threads.start("records", self._look)

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.stop(timeout_s=0)
        self._pods.close()

    # RecordSource

    def page(self) -> RecordPage:
        return self._pages[ALL_PATH].page

    def wait(self, timeout_s: float) -> None:
        self._await(ALL_PATH, self._pages[ALL_PATH].etag, timeout_s)

    def close(self) -> None:
        """`stop` does it."""

    def _look(self) -> None:
        """One turn of the thread: it waits for pods' changes, and looks for those of the own engines."""
        self._pods.wait(_LOOK_S)
        try:
            own = tuple(msgspec.Raw(seal_record(one, self._key)) for one in self._own.read().values())
        except StoreError:  # no engine has been ready yet
            own = ()
        others = self._pods.page()
        whole = RecordPage((*own, *others.workers), others.problem) if others.workers is not None else others
        found = {OWN_PATH: _Told(RecordPage(own)), ALL_PATH: _Told(whole)}
        with self._changed:
            if any(found[path].etag != told.etag for path, told in self._pages.items()):
                self._pages = found
                self._changed.notify_all()

    def _route(self, path: str) -> Records:
        def answer(known: str, prefer: str) -> tuple[int, bytes, str]:
            wait_s = int(asked.group(1)) if (asked := _WAIT.search(prefer)) else 0
            if wait_s and self._num_waiting >= _MAX_WAITING:
                return 503, b'{"problem":"too many wait for records here; ask again later"}', ""
            self._await(path, known, min(wait_s, MAX_WAIT_S))
            told = self._pages[path]
            return (304, b"", told.etag) if known == told.etag else (200, told.body, told.etag)

        return answer

    def _await(self, path: str, known: str, timeout_s: float) -> None:
        """Return when the page has another tag, or after `timeout_s`."""
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: self._is_stopping or self._pages[path].etag != known, timeout_s)
            self._num_waiting -= 1


class _Told:
    def __init__(self, page: RecordPage) -> None:
        self.page, self.body = page, msgspec.json.encode(page)
        self.etag = f'"{hashlib.blake2b(self.body, digest_size=12).hexdigest()}"'
