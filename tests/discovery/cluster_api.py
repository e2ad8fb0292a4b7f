"""An API server that answers about EndpointSlices as Kubernetes documents it: lists in parts, watches, what ends them.

https with a certificate of its own, a token that may change, and a Service's slices that a test sets.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from bireme.launch.health_server import SmallHttpServer

SERVICE, NAMESPACE = "pair-workers", "llm"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def endpoint(address: str, pod: str = "", *, is_ready: bool = True, is_terminating: bool = False) -> dict[str, Any]:
    conditions = {"ready": is_ready and not is_terminating, "serving": is_ready, "terminating": is_terminating}
    name = pod or f"pod-{address}"
    target = {"kind": "Pod", "namespace": NAMESPACE, "name": name, "uid": f"uid-{name}"}
    return {"addresses": [address], "conditions": conditions, "nodeName": "node-1", "targetRef": target}


def endpoint_slice(name: str, port: int, *endpoints: dict[str, Any], family: str = "IPv4") -> dict[str, Any]:
    """Return one without its version, which the server gives it."""
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": SERVICE,
                "service.kubernetes.io/headless": "",
            },
        },
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": [
            {"name": "grpc", "port": 8001, "protocol": "TCP"},
            {"name": "health", "port": port, "protocol": "TCP"},
        ],
    }


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    }  # fmt: skip


class ClusterApi:
    """`start`, `stop`. What it was asked is in `asked`: (is it a watch, its query)."""

    def __init__(self, folder: Path) -> None:
        """`folder`: becomes the service account's."""
        self.account = folder
        self._make_certificate()
        (folder / "namespace").write_text(NAMESPACE)
        self.asked: list[tuple[bool, dict[str, str]]] = []
        self.refusals: list[tuple[int, dict[str, str]]] = []  # of the next calls: status and headers
        self.part = 0  # slices of an answer; 0: all
        self._token = ""
        self.rotate("first")
        self._slices: dict[str, dict[str, Any]] = {}
        self._version, self._oldest = 100, 0
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._changed = threading.Condition()
        self._watches = 0  # ended so far
        self._server = self._open(0)
        self.port = self._server.port

    def environment(self) -> dict[str, str]:
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.port)}

    def start(self) -> None:
        self._server.start("cluster-api")

    def stop(self) -> None:
        self.end_watches()
        self._server.stop()

    def start_again(self) -> None:
        """At the same port, with what it knew."""
        self._server = self._open(self.port)
        self.start()

    def rotate(self, token: str, *, is_mounted: bool = True) -> None:
        """Take another token from now on. `is_mounted`: the pod's file has it, too."""
        self._token = token
        if is_mounted:
            (self.account / "token").write_text(token + "\n")

    def put(self, one: dict[str, Any]) -> None:
        name = one["metadata"]["name"]
        with self._changed:  # a list has the slice with its version, or neither: a watch from there misses nothing
            self._tell("MODIFIED" if name in self._slices else "ADDED", one)
            self._slices[name] = one

    def delete(self, name: str) -> None:
        with self._changed:
            self._tell("DELETED", self._slices.pop(name))

    def bookmark(self) -> int:
        """Tell watches a version that no slice has; return it."""
        metadata = {"resourceVersion": "", "creationTimestamp": None}
        self._tell("BOOKMARK", {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata})
        return self._version

    def forget(self) -> None:
        """Know no version before this one: watches of older ones get ERROR with 410."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._events.clear()
            self._changed.notify_all()

    def end_watches(self) -> None:
        with self._changed:
            self._watches += 1
            self._changed.notify_all()

    def _tell(self, kind: str, one: dict[str, Any]) -> None:
        with self._changed:
            self._version += 1
            one["metadata"]["resourceVersion"] = str(self._version)
            self._events.append((self._version, {"type": kind, "object": json.loads(json.dumps(one))}))
            self._changed.notify_all()

    def _list(self, query: dict[str, str]) -> dict[str, Any]:
        with self._changed:
            items, metadata = list(self._slices.values()), {"resourceVersion": str(self._version)}
        begin, part = int(query.get("continue", "0")), self.part or len(items)
        if begin + part < len(items):
            metadata |= {"continue": str(begin + part), "remainingItemCount": len(items) - begin - part}
        found = [{key: value for key, value in one.items() if key not in ("kind", "apiVersion")} for one in items]
        kinds = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
        return kinds | {"metadata": metadata, "items": found[begin : begin + part]}

    def _watch(self, version: int, ended: int) -> Iterator[dict[str, Any]]:
        """`ended`: how many were when this one began."""
        while True:
            with self._changed:
                is_expired = version < self._oldest
                found = [event for at, event in self._events if at > version]
                if not is_expired and not found:
                    if self._watches != ended:
                        return
                    self._changed.wait(10)
                    continue
                asked, version = version, self._version
            if is_expired:
                yield {"type": "ERROR", "object": status(410, "Expired", f"too old resource version: {asked}")}
                return
            yield from found

    def _open(self, port: int) -> SmallHttpServer:
        server = SmallHttpServer("127.0.0.1", port, self._handler())
        server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.tls.load_cert_chain(self.account / "ca.crt", self.account / "ca.key")
        return server

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                api.asked.append(("watch" in query, query))
                if self.headers.get("Authorization") != f"Bearer {api._token}":
                    self._answer(401, status(401, "Unauthorized", "Unauthorized"))
                elif api.refusals:
                    code, headers = api.refusals.pop(0)
                    self._answer(code, status(code, "Refused", f"refused with {code}"), headers)
                elif url.path != PATH or query["labelSelector"] != f"kubernetes.io/service-name={SERVICE}":
                    self._answer(200, {"metadata": {"resourceVersion": "1"}, "items": []})
                elif "watch" in query:
                    self._stream(api._watch(int(query["resourceVersion"]), api._watches))
                else:
                    self._answer(200, api._list(query))

            def _answer(self, code: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
                payload = json.dumps(body).encode()
                self.send_response(code)
                for name, value in {"Content-Length": str(len(payload)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            def _stream(self, events: Iterator[dict[str, Any]]) -> None:
                """In chunks that split lines, as a proxy's may."""
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for event in events:
                    line = json.dumps(event).encode() + b"\n"
                    for part in (line[:7], line[7:]):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.write(b"0\r\n\r\n")
                self.close_connection = True

            def log_message(self, format: str, *arguments: object) -> None:
                """`asked` has it."""

        return Handler

    def _make_certificate(self) -> None:
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=api"
        files = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", "ca.crt", "-keyout", "ca.key"]
        try:
            subprocess.run([*command.split(), *files], check=True, capture_output=True, cwd=self.account)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"openssl can't make certificates here: {error}")


@contextlib.contextmanager
def cluster_api(folder: Path) -> Iterator[ClusterApi]:
    api = ClusterApi(folder)
    api.start()
    try:
        yield api
    finally:
        api.stop()
