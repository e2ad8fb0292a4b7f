"""An API server that knows workloads and their scale subresources as well, and answers as Kubernetes documents it."""

from __future__ import annotations

import http.server
import json
import re
from pathlib import Path
from typing import Any

from tests.discovery.cluster_api import NAMESPACE, ClusterApi, status

_SCALED = re.compile(
    rf"/apis/(apps/v1|leaderworkerset\.x-k8s\.io/v1)/namespaces/{NAMESPACE}/(\w+)/([a-z0-9-]+?)(/scale)?"
)
_GROUPS = {"deployments": "apps/v1", "leaderworkersets": "leaderworkerset.x-k8s.io/v1"}


class ScaleApi(ClusterApi):
    def __init__(self, folder: Path) -> None:
        self.workloads: dict[tuple[str, str], dict[str, Any]] = {}  # plural kind and name -> object
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.forbidden: set[str] = set()  # methods
        super().__init__(folder)

    def add(self, name: str, wanted: int, kind: str = "deployments", **told: int) -> None:
        self.workloads[kind, name] = {
            "apiVersion": _GROUPS[kind],
            "kind": "Deployment" if kind == "deployments" else "LeaderWorkerSet",
            "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": "7"},
            "spec": {"replicas": wanted},
            "status": {"replicas": wanted, "readyReplicas": wanted, **told},
        }

    def replicas(self, name: str, kind: str = "deployments") -> int:
        return int(self.workloads[kind, name]["spec"]["replicas"])

    def answer(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]] | None:
        """None: it is no workload's path."""
        if (match := _SCALED.fullmatch(path)) is None:
            return None
        group, kind, name, is_scale = match.groups()
        if method in self.forbidden:
            return 403, status(403, "Forbidden", f"{kind}.apps {name!r} is forbidden")
        one = self.workloads.get((kind, name))
        if one is None or _GROUPS.get(kind) != group:
            return 404, status(404, "NotFound", f"{kind}.apps {name!r} not found")
        if method == "PATCH":
            return self._patched(one, path, body or {})
        if not is_scale:
            return 200, one
        return 200, {
            "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": one["metadata"],
            "spec": {"replicas": one["spec"]["replicas"]}, "status": {"replicas": one["status"]["replicas"]},
        }  # fmt: skip

    def _patched(self, one: dict[str, Any], path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.patches.append((path, body))
        seen = body.get("metadata", {}).get("resourceVersion", one["metadata"]["resourceVersion"])
        if seen != one["metadata"]["resourceVersion"]:
            return 409, status(409, "Conflict", "the object has been modified; please apply your changes again")
        one["spec"]["replicas"] = body["spec"]["replicas"]
        one["metadata"]["resourceVersion"] = str(int(seen) + 1)
        return 200, {"kind": "Scale", "spec": one["spec"]}

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        api, of_slices = self, super()._handler()

        class ScaleHandler(of_slices):  # type: ignore[valid-type,misc]
            def do_GET(self) -> None:
                if not self._did("GET", None):
                    super().do_GET()

            def do_PATCH(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Type"] != "application/merge-patch+json":
                    self._answer(415, status(415, "UnsupportedMediaType", "the body is of no type that is known"))
                elif not self._did("PATCH", json.loads(content)):
                    self._answer(404, status(404, "NotFound", "the server could not find the requested resource"))

            def _did(self, method: str, body: dict[str, Any] | None) -> bool:
                if self.headers.get("Authorization") != f"Bearer {api._token}":
                    return False
                answer = api.answer(method, self.path.split("?")[0], body)
                if answer is not None:
                    self._answer(*answer)
                return answer is not None

        return ScaleHandler
