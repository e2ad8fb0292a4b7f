"""Which pods a Service of Kubernetes has, from its EndpointSlices: one list, then a watch that goes on from there.

Two GETs are all that is asked of the API server, so http.client does it. Token and certificates are read anew for each,
because the cluster rotates them. A pod counts whether it is ready, serving or terminating: its own records say what it
may be asked for, also while it loads or drains.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

import msgspec

from bireme.discovery.store import StoreError
from bireme.errors import ConfigError
from bireme.settings import DiscoveryConfig

PORT_NAME = "health"  # of the port, in the Service, at which pods tell their records
_TIMEOUT_S = 5.0  # of a call
_WATCH_S = 290  # then the API server ends a watch, and another begins
_REST_S = 0.2  # before the next, and before a list because of 410: a server that ends each at once is not hammered
_PAGE = 500  # slices of an answer
_MAX_EVENT_BYTES = 4 << 20  # a slice has 1000 endpoints at most
_IDLE_S, _INTERVAL_S, _PROBES = 5, 2, 3  # keep-alive: a watch whose other end is gone ends after 11 s
_GONE = 410


class ApiError(StoreError):
    def __init__(self, text: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.status, self.retry_after_s = status, retry_after_s


@dataclass(frozen=True, slots=True)
class Pod:
    name: str  # unique over its lives
    addresses: tuple[str, ...]  # one of each family
    port: int


class _Target(msgspec.Struct):
    name: str = ""
    uid: str = ""


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    targetRef: _Target | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Metadata(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""
    more: str = msgspec.field(name="continue", default="")


class _Slice(msgspec.Struct):
    metadata: _Metadata
    addressType: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _SliceList(msgspec.Struct):
    metadata: _Metadata
    items: list[_Slice] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Failure(msgspec.Struct):
    message: str = ""
    code: int = 0


class EndpointSlices:
    """Of one thread but for `close`."""

    def __init__(self, config: DiscoveryConfig) -> None:
        """Raises ConfigError outside of a cluster."""
        self._account = Path(config.service_account)
        self._service, _, namespace = config.service.partition(".")
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "discovery.backend: kubernetes; KUBERNETES_SERVICE_HOST is not set, so this process runs in no pod:"
                " use a folder or etcd outside of a cluster"
            )
        self._host, self._port = host, int(port)
        self._namespace = namespace or self._read("namespace")
        self._slices: dict[str, _Slice] = {}  # by name
        self._version = ""  # of what is known; "": list first
        self._connection: http.client.HTTPSConnection | None = None
        self._closing = threading.Event()

    def follow(self) -> Iterator[dict[str, Pod]]:
        """Yield the pods by name: now, when a watch begins, and after each change. Raises StoreError.

        Called again after an error it goes on from where it was.
        """
        while True:
            if not self._version:
                self._list()
                yield self._pods()
            yield from self._watch()
            self._closing.wait(_REST_S)

    def close(self) -> None:
        self._closing.set()
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _list(self) -> None:
        found: dict[str, _Slice] = {}
        more = ""
        while True:
            with self._get(limit=str(_PAGE), **({"continue": more} if more else {})) as response:
                answer = msgspec.json.decode(response.read(), type=_SliceList)
            found |= {one.metadata.name: one for one in answer.items or ()}
            if not (more := answer.metadata.more):
                break
        if not found:  # a Service with a selector has one, also while it has no pod
            raise ApiError(f"Service {self._namespace}/{self._service} has no EndpointSlices: make it, or name another")
        self._slices, self._version = found, answer.metadata.resourceVersion

    def _watch(self) -> Iterator[dict[str, Pod]]:
        """Return when the watch has ended, or what is known is too old to go on from."""
        asked = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_S)}
        try:
            with self._get(**asked, resourceVersion=self._version) as response:
                yield self._pods()
                while line := response.readline(_MAX_EVENT_BYTES):
                    if self._take(msgspec.json.decode(line, type=_Event)):
                        yield self._pods()
        except ApiError as error:
            if error.status != _GONE:
                raise
            self._version = ""

    def _take(self, event: _Event) -> bool:
        """Return whether the slices have changed."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Failure)
            raise ApiError(f"the watch of EndpointSlices ended: {status.message}", status.code)
        changed = msgspec.json.decode(event.object, type=_Slice)
        self._version = changed.metadata.resourceVersion
        if event.type == "BOOKMARK":
            return False
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        else:
            self._slices[changed.metadata.name] = changed
        return True

    def _pods(self) -> dict[str, Pod]:
        """A pod is in the slices of both families, and for a moment in two of one, when it moves."""
        pods: dict[str, Pod] = {}
        for one in sorted(self._slices.values(), key=lambda found: (found.addressType, found.metadata.name)):
            for pod in _pods_of(one):
                known = pods.get(pod.name, pod).addresses
                pods[pod.name] = Pod(pod.name, tuple(dict.fromkeys((*known, *pod.addresses))), pod.port)
        return pods

    @contextlib.contextmanager
    def _get(self, **query: str) -> Iterator[http.client.HTTPResponse]:
        """Yield an answer 200. What goes wrong is an ApiError."""
        connection: http.client.HTTPSConnection | None = None
        try:
            token = self._read("token")
            context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=context)
            self._connection = connection
            if self._closing.is_set():
                raise ApiError("discovery is closed")
            connection.connect()
            labeled = {"labelSelector": f"kubernetes.io/service-name={self._service}", **query}
            path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(self._namespace)}/endpointslices?{urlencode(labeled)}"
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}", "Accept": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise self._refusal(response)
            if "watch" in query:
                _keep_alive(connection.sock)
            yield response
        except (OSError, http.client.HTTPException, msgspec.MsgspecError, ConfigError) as error:
            raise ApiError(f"API server at {self._host}:{self._port}: {error or type(error).__name__}") from error
        except AttributeError as error:  # it was closed meanwhile
            raise ApiError("discovery is closed") from error
        finally:
            self._connection = None
            if connection is not None:
                connection.close()

    def _refusal(self, response: http.client.HTTPResponse) -> ApiError:
        body = response.read(64 << 10)
        try:
            reason = msgspec.json.decode(body, type=_Failure).message
        except msgspec.MsgspecError:
            reason = body[:200].decode(errors="replace")
        remedy = {
            401: f"; {self._account}/token is not taken, it is read again",
            403: f"; give the pods' service account get, list and watch of endpointslices in {self._namespace}",
        }.get(response.status, "")
        after = response.getheader("Retry-After") or ""
        text = f"API server at {self._host}:{self._port}: {response.status} {reason}{remedy}"
        return ApiError(text, response.status, float(after) if after.isdigit() else 0.0)

    def _read(self, name: str) -> str:
        """Raises ConfigError."""
        try:
            return (self._account / name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"discovery.service_account: {self._account / name} can't be read ({error}); give the pod a service"
                " account, and automountServiceAccountToken: true"
            ) from error


def _pods_of(one: _Slice) -> Iterator[Pod]:
    port = next((port.port for port in one.ports or () if port.name == PORT_NAME), None)
    if port is None or one.addressType == "FQDN":
        return
    for endpoint in one.endpoints or ():
        address, target = endpoint.addresses[0], endpoint.targetRef
        yield Pod((target.uid or target.name) if target is not None else address, (address,), port)


def _keep_alive(connection: socket.socket) -> None:
    """A watch may be silent for as long as it lasts."""
    connection.settimeout(_WATCH_S + 10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _INTERVAL_S),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
