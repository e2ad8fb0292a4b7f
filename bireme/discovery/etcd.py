"""Workers' records in etcd: a key a worker under a lease, followed by a watch.

Over etcd's HTTP gateway (etcd3gw). A watch says only that something changed: the whole prefix is read then, and every
few seconds anyway.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import math
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from bireme.discovery.records import WorkerRecord, open_record, seal_record
from bireme.discovery.store import Refused, StoreError, taken
from bireme.errors import ConfigError
from bireme.settings import DiscoveryConfig

TIMEOUT_S = 2.0  # of a call
_SETTLE_S = 0.02  # changes come together: a server has several workers
logger = logging.getLogger("bireme.discovery")


class EtcdStore:
    """RecordStore."""

    problem = ""

    def __init__(self, config: DiscoveryConfig, key: bytes) -> None:
        """`key`: the deployment's. Raises ConfigError."""
        try:
            import etcd3gw  # noqa: F401
        except ImportError:
            raise ConfigError("discovery.backend: etcd needs etcd3gw: pip install 'bireme[etcd]'") from None
        self._config, self._key = config, key
        self.refused: dict[str, Refused] = {}
        self._prefix = f"{config.prefix}/workers/"
        self._endpoints = itertools.cycle(config.endpoints)
        self._endpoint = next(self._endpoints)
        self._client: Any = None
        self._lease: Any = None  # of all that is held
        self._held: dict[str, WorkerRecord] = {}
        self._watch: Any = None  # the open response
        self._changes: Iterator[bytes] = iter(())  # of it; urllib3 ends a response whose iterator is dropped
        self._unread: dict[str, bytes] = {}  # what has been complained about, by id
        self._is_closed = False

    def read(self) -> dict[str, WorkerRecord]:
        with self._errors() as client:
            if self._watch is None:
                self._watch = self._open_watch(client)  # first, so that no change falls between the two
            pairs = client.get_prefix(self._prefix)
        values = {meta["key"].decode(errors="replace").removeprefix(self._prefix): value for value, meta in pairs}
        opened = {name: one for name, value in values.items() if (one := self._open(name, value)) is not None}
        self.refused = {name: one for name, one in opened.items() if one[1]}
        return {name: record for name, (record, doubt) in opened.items() if not doubt}

    def wait(self, timeout_s: float) -> None:
        """A watch silent for `timeout_s` is opened anew."""
        import requests

        if (response := self._watch) is None:  # it was closed meanwhile
            return
        raw = response.raw
        try:
            if raw.connection is not None and raw.connection.sock is not None:
                raw.connection.sock.settimeout(timeout_s)
            if next(self._changes, None):
                time.sleep(_SETTLE_S)
                return
        except (requests.RequestException, OSError, AttributeError, ValueError):  # silence, or it was closed
            pass
        self._close_watch()

    def hold(self, record: WorkerRecord) -> None:
        name = record.id
        with self._errors() as client:
            if self._lease is not None and self._lease.refresh() <= 0:
                self._lease = None  # it ended while etcd could not be reached
                self._held.clear()
            if self._lease is None:
                self._lease = client.lease(math.ceil(self._config.lease_s))
            if self._held.get(name) == record:
                return
            key, value = self._prefix + name, seal_record(record, self._key)
            if not client.create(key, value, lease=self._lease):
                present = client.get(key)
                rival = self._open(name, present[0]) if present else None
                if rival is not None and not rival[1] and rival[0].launch != record.launch:
                    raise taken(record, rival[0])
                client.put(key, value, lease=self._lease)
        self._held[name] = record

    def withdraw(self) -> None:
        lease, self._lease = self._lease, None
        self._held.clear()
        if lease is not None:
            with self._errors() as client:
                lease.client = client  # it has none if etcd could not be reached before
                lease.revoke()

    def close(self) -> None:
        self._is_closed = True
        if (watch := self._watch) is not None and (connection := watch.raw.connection) is not None:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # else closing waits for the thread that reads
        self._close_watch()

    def _open_watch(self, client: Any) -> Any:
        begin, end = self._prefix, self._prefix[:-1] + chr(ord("/") + 1)
        create = {"key": _base64(begin), "range_end": _base64(end)}
        url = client.get_url("/watch")
        response = client.session.post(
            url, json={"create_request": create}, stream=True, timeout=(TIMEOUT_S, TIMEOUT_S)
        )
        response.raise_for_status()
        self._changes = response.iter_content(chunk_size=None)
        if b'"created":true' not in next(self._changes, b""):
            raise StoreError(f"etcd at {self._endpoint}: it refused a watch")
        return response

    def _close_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _open(self, name: str, value: bytes) -> Refused | None:
        """Return a record and why not to trust it; None: it is none."""
        is_logged = self._unread.get(name) == value
        try:
            record, doubt = open_record(value, self._key)
        except ValueError as error:
            self._unread[name] = value
            if not is_logged:
                logger.warning("record_unreadable key=%s error=%s", self._prefix + name, error)
            return None
        if doubt:
            self._unread[name] = value
            if not is_logged:
                logger.error("record_refused key=%s reason=%s", self._prefix + name, doubt)
        return record, doubt

    @contextlib.contextmanager
    def _errors(self) -> Iterator[Any]:
        """Yield the client. What goes wrong becomes a StoreError and changes the endpoint."""
        import requests
        from etcd3gw.exceptions import Etcd3Exception

        if self._is_closed:
            raise StoreError("discovery is closed")
        try:
            if self._client is None:
                self._client = self._connect()
            yield self._client
        except (Etcd3Exception, requests.RequestException, OSError, KeyError, ValueError) as error:
            detail = getattr(error, "detail_text", None) or str(error) or type(error).__name__
            endpoint = self._endpoint
            self._close_watch()
            if self._lease is not None and "lease not found" in detail:
                self._lease = None
                self._held.clear()
            client, self._client, self._endpoint = self._client, None, next(self._endpoints)
            if client is not None:
                client.session.close()
            if self._lease is not None:
                self._lease.client = None
            raise StoreError(f"etcd at {endpoint}: {str(detail)[:200]}") from error

    def _connect(self) -> Any:
        import requests
        from etcd3gw.client import Etcd3Client

        config, address = self._config, urlsplit(self._endpoint)
        session = requests.Session()
        session.trust_env = False  # a proxy for the internet has no business here
        if config.ca_cert:
            session.verify = config.ca_cert
        if config.cert:
            session.cert = (config.cert, config.cert_key)
        client = Etcd3Client(
            host=address.hostname, port=address.port, protocol=address.scheme, timeout=TIMEOUT_S, session=session
        )
        if self._lease is not None:
            self._lease.client = client
        return client


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
