"""Pods of a deployment in Kubernetes: PATCH of the scale subresource of what make_manifests.py --apart has written.

    NAME-prefill, NAME-decode    Deployments, or LeaderWorkerSets where an engine spans nodes: a pod, or group, a worker
    NAME-workers                 the Service whose EndpointSlices name all pods; each tells its own metrics

Kubernetes chooses which pod ends. Its preStop hook drains it before, so no request is lost.
"""

from __future__ import annotations

import http.client
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from bireme.discovery.endpoint_slices import ApiError, EndpointSlices, Pod
from bireme.errors import ConfigError, UnavailableError
from bireme.launch.doors import get
from bireme.launch.tritonserver import address
from bireme.scaling.connector import STAGES, Sizes, SourcePage, StageSize
from bireme.settings import DiscoveryConfig

_TIMEOUT_S, _PAGE_S = 10.0, 5.0
_KINDS = ("apps/v1/{}/deployments", "leaderworkerset.x-k8s.io/v1/{}/leaderworkersets")  # asked for in this order
_MERGE = "application/merge-patch+json"
_NOT_FOUND, _CONFLICT = 404, 409


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesTarget:
    name: str  # of the deployment, as make_manifests.py --name
    namespace: str = ""  # "": the own pod's
    service_account: str = DiscoveryConfig().service_account
    metrics_port: int = 8002  # of pods with workers
    openai_port: int = 9000  # of frontends
    openai_key: str = ""  # that may read a frontend's metrics


class _Version(msgspec.Struct):
    resourceVersion: str = ""


class _Wanted(msgspec.Struct):
    replicas: int = 1  # as Kubernetes has it where nothing is said


class _PodCounts(msgspec.Struct):
    replicas: int = 0
    readyReplicas: int = 0
    terminatingReplicas: int | None = None  # from 1.33 on


class _Workload(msgspec.Struct):
    """A Deployment, a LeaderWorkerSet or the Scale of one; of the last `status` has no more than `replicas`."""

    metadata: _Version = msgspec.field(default_factory=_Version)
    spec: _Wanted = msgspec.field(default_factory=_Wanted)
    status: _PodCounts = msgspec.field(default_factory=_PodCounts)


class _Refused(msgspec.Struct):
    message: str = ""


class KubernetesWorkloads:
    """Connector."""

    def __init__(self, target: KubernetesTarget, stages: Sequence[str] = STAGES) -> None:
        """`stages`: that have workloads. Raises ConfigError outside of a cluster."""
        self._target, self._account, self._stages = target, Path(target.service_account), stages
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError("--kubernetes: KUBERNETES_SERVICE_HOST is not set; run the planner in a pod")
        self._host, self._port = host, int(port)
        self._namespace = target.namespace or self._read("namespace")
        self._paths: dict[str, str] = {}  # of each stage's workload, once it is found

    def sizes(self) -> Sizes:
        return {stage: _size_of(self._workload(stage)) if stage in self._stages else StageSize() for stage in STAGES}

    def pages(self) -> Sequence[SourcePage]:
        """A pod that starts or ends need not answer; another one must."""
        pods = self._pods()
        found = {name: page for name, pod in pods.items() if (page := self._page(pod))}
        sizes = self.sizes()
        num_excused = sum(one.num_starting + one.num_ending for one in sizes.values())
        silent = [pod.addresses[0] for name, pod in pods.items() if name not in found]
        if len(silent) > num_excused:
            raise UnavailableError(f"pods {', '.join(sorted(silent)[:5])} tell no metrics at their ports")
        return [SourcePage(name, text) for name, text in found.items()]

    def scale(self, wanted: Mapping[str, int]) -> list[str]:
        done = []
        for stage in self._stages:
            if (count := wanted.get(stage)) is None:
                continue
            scale = self._decoded(self._call("GET", f"{self._path(stage)}/scale"))
            if scale.spec.replicas == count:
                continue
            # With the version that was seen, so that what another one has changed meanwhile is not undone.
            body = {"metadata": {"resourceVersion": scale.metadata.resourceVersion}, "spec": {"replicas": count}}
            try:
                self._call("PATCH", f"{self._path(stage)}/scale", body)
            except ApiError as error:
                if error.status == _CONFLICT:
                    raise UnavailableError(
                        f"{self._name(stage)}: it was changed meanwhile; is there an autoscaler, too? ({error})"
                    ) from error
                raise
            done.append(f"{self._name(stage)} {scale.spec.replicas} -> {count} replicas")
        return done

    def _name(self, stage: str) -> str:
        return f"{self._target.name}-{stage}"

    def _path(self, stage: str) -> str:
        """Raises UnavailableError where there is no such workload."""
        if stage not in self._paths:
            self._workload(stage)
        return self._paths[stage]

    def _workload(self, stage: str) -> _Workload:
        if (known := self._paths.get(stage)) is not None:
            return self._decoded(self._call("GET", known))
        for kind in _KINDS:
            path = f"/apis/{kind.format(f'namespaces/{quote(self._namespace)}')}/{quote(self._name(stage))}"
            try:
                found = self._decoded(self._call("GET", path))
            except ApiError as error:
                if error.status != _NOT_FOUND:
                    raise
                continue
            self._paths[stage] = path
            return found
        raise UnavailableError(
            f"{self._namespace}/{self._name(stage)}: no such Deployment or LeaderWorkerSet; tools/make_manifests.py"
            " --apart makes one for each stage"
        )

    def _pods(self) -> dict[str, Pod]:
        service = f"{self._target.name}-workers.{self._namespace}"
        slices = EndpointSlices(
            DiscoveryConfig(backend="kubernetes", service=service, service_account=self._target.service_account)
        )
        try:
            return next(slices.follow())
        finally:
            slices.close()

    def _page(self, pod: Pod) -> str:
        """Return Triton's metrics, or a frontend's; "": it tells none."""
        for port, key in ((self._target.metrics_port, ""), (self._target.openai_port, self._target.openai_key)):
            try:
                return get(address(pod.addresses[0], port), "/metrics", _PAGE_S, key=key).decode()
            except (OSError, http.client.HTTPException, UnicodeDecodeError):
                continue
        return ""

    def _decoded(self, body: bytes) -> _Workload:
        try:
            return msgspec.json.decode(body, type=_Workload)
        except msgspec.MsgspecError as error:
            raise ApiError(f"API server at {self._host}:{self._port}: {error}") from error

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Token and certificate are read for each call, since they change. Raises ApiError."""
        connection: http.client.HTTPSConnection | None = None
        try:
            context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=context)
            headers = {"Authorization": f"Bearer {self._read('token')}", "Accept": "application/json"}
            headers |= {"Content-Type": _MERGE} if body is not None else {}
            connection.request(method, path, msgspec.json.encode(body) if body is not None else None, headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"API server at {self._host}:{self._port}: {error or type(error).__name__}") from error
        finally:
            if connection is not None:
                connection.close()
        if status != http.HTTPStatus.OK:
            raise self._refusal(status, text, method, path)
        return text

    def _refusal(self, status: int, text: bytes, method: str, path: str) -> ApiError:
        try:
            reason = msgspec.json.decode(text, type=_Refused).message
        except msgspec.MsgspecError:
            reason = text[:200].decode(errors="replace")
        verb = "patch" if method == "PATCH" else "get"
        remedy = f"; give the planner's service account {verb} of {path}" if status == http.HTTPStatus.FORBIDDEN else ""
        return ApiError(f"API server at {self._host}:{self._port}: {status} {reason}{remedy}", status)

    def _read(self, name: str) -> str:
        """Raises ConfigError."""
        try:
            return (self._account / name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--kubernetes: {self._account / name} can't be read ({error}); give the planner's pod a service"
                " account, and automountServiceAccountToken: true"
            ) from error


def _size_of(workload: _Workload) -> StageSize:
    """Of more pods than are wanted those that are too many end."""
    status, wanted = workload.status, workload.spec.replicas
    ending = max(status.replicas - wanted, 0) + (status.terminatingReplicas or 0)
    ready = min(status.readyReplicas, wanted)
    return StageSize(ready, wanted - ready, ending)
