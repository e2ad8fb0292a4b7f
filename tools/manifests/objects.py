"""The objects, as Kubernetes has them: core, apps, autoscaling, policy and networking, and three kinds of others'."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from bireme.discovery.endpoint_slices import PORT_NAME
from tools.manifests.plan import KEYS, MODELS, VOLUME, Options, PodSet
from tools.manifests.ranks import (
    RANK_COMMAND,
    RANK_PRE_STOP,
    SSH_ENV,
    SSH_PORT,
    group_hosts,
    mpirun,
    node_role,
    wait_for,
)

Manifest = dict[str, Any]
OPENAI, GRPC, METRICS, HEALTH, ADMIN = 9000, 8001, 8002, 8003, 8004
EVERYWHERE = "0.0.0.0"  # noqa: S104  # in a pod; the network policy says who gets there
RECIPE, SHM = "/etc/bireme/recipe", "/dev/shm"  # noqa: S108  # volumes of the pod's own
USER = 10001  # of the images (docker/)
_START_S, _DRAIN_S = 1800, 30  # until a model must be loaded; serve.py's own --drain-timeout
_WAITING = 4  # requests in an engine's queue on average, from which there are too few pods
_KV_PERCENT = 85


class Objects:
    """All objects of one deployment."""

    def __init__(self, options: Options, sets: list[PodSet], files: Mapping[str, str], model_from: str) -> None:
        self._options, self._sets, self._files, self._model_from = options, sets, files, model_from
        self._name = options.name

    def base(self) -> Iterator[Manifest]:
        yield self._object("v1", "ConfigMap", f"{self._name}-recipe", data=dict(self._files))
        if self._model_from != "image":
            yield self._volume_claim()
        for pods in self._sets:
            yield self._leader_worker_set(pods) if pods.spans_nodes else self._deployment(pods)
            yield self._budget(pods.role)
            if pods.spans_nodes:
                yield self._budget(node_role(pods))
        yield self._service()
        yield self._metrics_service()
        if self._options.service:
            yield self._workers_service()
            yield from self._rights()

    def secret(self, keys: Mapping[str, str]) -> Manifest:
        return self._object("v1", "Secret", f"{self._name}-keys", type="Opaque", stringData=dict(keys))

    def network_policy(self) -> Iterator[Manifest]:
        """OpenAI's port is open to all pods, metrics to the namespace `monitoring`, all else to the pods themselves."""
        monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        spec = {
            "podSelector": {"matchLabels": self._labels()},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"protocol": "TCP", "port": OPENAI}]},
                {"from": [monitoring], "ports": [{"protocol": "TCP", "port": METRICS}]},
                {"from": [{"podSelector": {"matchLabels": self._labels()}}]},
            ],
        }
        yield self._object("networking.k8s.io/v1", "NetworkPolicy", self._name, spec=spec)

    def autoscaling(self) -> Iterator[Manifest]:
        """By what waits and by how full the KV pools are: metrics of pods, which prometheus-adapter serves."""
        for pods in self._sets:
            if pods.is_frontend:
                continue
            spec = {
                "scaleTargetRef": {**_WORKLOADS[pods.spans_nodes], "name": self._of(pods)},
                "minReplicas": pods.replicas,
                "maxReplicas": 4 * pods.replicas,
                "metrics": [
                    _pods_metric("bireme_requests_waiting", str(_WAITING)),
                    _pods_metric("bireme_kv_usage_percent", str(_KV_PERCENT)),
                ],
                # A pod is ready after minutes and drained after minutes: up at once, down slowly.
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600,
                                           "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}]}},
            }  # fmt: skip
            yield self._object("autoscaling/v2", "HorizontalPodAutoscaler", self._of(pods), spec=spec)
        rules = {"rules": [_adapter_rule(name, query) for name, query in _ADAPTER.items()]}
        yield self._object(
            "v1", "ConfigMap", f"{self._name}-adapter-rules", data={"config.yaml": json.dumps(rules, indent=2)}
        )

    def monitoring(self) -> Iterator[Manifest]:
        endpoints: list[Manifest] = [{"port": "metrics", "path": "/metrics", "interval": "15s"}]
        openai: Manifest = {"port": "openai", "path": "/metrics", "interval": "15s"}
        if self._options.api_keys:
            openai["authorization"] = {"credentials": {"name": f"{self._name}-scrape", "key": "api-key"}}
        spec = {"selector": {"matchLabels": self._labels(part="metrics")}, "endpoints": [*endpoints, openai]}
        yield self._object("monitoring.coreos.com/v1", "ServiceMonitor", self._name, spec=spec)

    def gateway(self) -> Iterator[Manifest]:
        spec = {
            "selector": {"matchLabels": self._labels(role=next(pods.role for pods in self._sets if pods.has_openai))},
            "targetPorts": [{"number": OPENAI}],
            "endpointPickerRef": {"name": self._options.picker, "port": {"number": 9002}},
        }
        yield self._object("inference.networking.k8s.io/v1", "InferencePool", self._name, spec=spec)

    def _object(self, version: str, kind: str, name: str, *, part: str = "", **fields: Any) -> Manifest:
        metadata: Manifest = {"name": name, "labels": self._labels(part=part)}
        if self._options.namespace:
            metadata["namespace"] = self._options.namespace
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}

    def _labels(self, role: str = "", part: str = "") -> Manifest:
        labels = {"app.kubernetes.io/name": "bireme", "app.kubernetes.io/instance": self._name}
        labels |= {"app.kubernetes.io/component": role} if role else {}
        return labels | ({"bireme/part": part} if part else {})

    def _of(self, pods: PodSet) -> str:
        return f"{self._name}-{pods.role}"

    def _volume_claim(self) -> Manifest:
        spec: Manifest = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": self._options.storage}},
        }
        if self._options.storage_class:
            spec["storageClassName"] = self._options.storage_class
        return self._object("v1", "PersistentVolumeClaim", f"{self._name}-models", spec=spec)

    def _service(self) -> Manifest:
        """For clients."""
        role = next(pods.role for pods in self._sets if pods.has_openai)
        spec = {
            "selector": self._labels(role=role),
            "ports": [{"name": "openai", "port": OPENAI, "targetPort": "openai", "appProtocol": "http"}],
        }
        return self._object("v1", "Service", self._name, spec=spec)

    def _metrics_service(self) -> Manifest:
        """Without an address of its own: each pod is scraped."""
        ports = [{"name": name, "port": port, "targetPort": name} for name, port in _SCRAPED.items()]
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": self._labels(), "ports": ports}
        return self._object("v1", "Service", f"{self._name}-metrics", part="metrics", spec=spec)

    def _workers_service(self) -> Manifest:
        """For discovery (bireme/discovery/endpoint_slices.py), which reads its slices; no client calls it."""
        ports = [{"name": PORT_NAME, "port": HEALTH, "targetPort": "health"}]
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": self._labels(), "ports": ports}
        return self._object("v1", "Service", self._options.service, part="workers", spec=spec)

    def _rights(self) -> Iterator[Manifest]:
        """Pods may read EndpointSlices of their namespace, and nothing else."""
        name, group = self._options.service, "rbac.authorization.k8s.io"
        account = {"kind": "ServiceAccount", "name": name, "namespace": self._options.namespace}
        rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        yield self._object("v1", "ServiceAccount", name, automountServiceAccountToken=False)
        yield self._object(f"{group}/v1", "Role", name, rules=[rule])
        role = {"apiGroup": group, "kind": "Role", "name": name}
        yield self._object(f"{group}/v1", "RoleBinding", name, roleRef=role, subjects=[account])

    def _budget(self, role: str) -> Manifest:
        spec = {"maxUnavailable": 1, "selector": {"matchLabels": self._labels(role=role)}}
        return self._object("policy/v1", "PodDisruptionBudget", f"{self._name}-{role}", spec=spec)

    def _leader_worker_set(self, pods: PodSet) -> Manifest:
        """A group of pods an engine: the leader has the server, the others ranks that its mpirun starts."""
        leader, other = self._template(pods), self._template(pods, node_role(pods))
        name, hosts = self._of(pods), group_hosts(self._of(pods), pods)
        container = leader["spec"]["containers"][0]
        container["command"] = mpirun(container["command"], hosts, pods.num_gpus, container["env"])
        container["env"] += [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, *SSH_ENV]
        waiting = {name: container[name] for name in ("image", "env", "securityContext", "volumeMounts")}
        leader["spec"]["initContainers"] = [{"name": "ranks", "command": wait_for(hosts[1:]), **waiting}]
        rank = other["spec"]["containers"][0]
        for field in ("ports", "startupProbe", "livenessProbe"):
            rank.pop(field)
        rank |= {"command": RANK_COMMAND, "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 5},
                 "lifecycle": {"preStop": {"exec": {"command": RANK_PRE_STOP}}}}  # fmt: skip
        spec = {
            "replicas": pods.replicas,
            "rolloutStrategy": {"type": "RollingUpdate",
                                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0}},
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {"size": pods.num_nodes, "restartPolicy": "RecreateGroupOnPodRestart",
                                     "leaderTemplate": leader, "workerTemplate": other},
        }  # fmt: skip
        return self._object("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, spec=spec)

    def _deployment(self, pods: PodSet) -> Manifest:
        # GPUs of another node may not be there, so the old pod goes first.
        spec = {
            "replicas": pods.replicas,
            "selector": {"matchLabels": self._labels(role=pods.role)},
            "strategy": {"type": "RollingUpdate",
                         "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0 if pods.num_gpus else 1}},
            "template": self._template(pods),
        }  # fmt: skip
        return self._object("apps/v1", "Deployment", self._of(pods), spec=spec)

    def _template(self, pods: PodSet, role: str = "") -> Manifest:
        """A new recipe is a new pod."""
        content = json.dumps(self._files, sort_keys=True).encode()
        annotations = {"bireme/recipe-digest": hashlib.sha256(content).hexdigest()[:16]}
        metadata = {"labels": self._labels(role=role or pods.role), "annotations": annotations}
        return {"metadata": metadata, "spec": self._pod(pods)}

    def _pod(self, pods: PodSet) -> Manifest:
        options = self._options
        spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
                  "labelSelector": {"matchLabels": self._labels(role=pods.role)}}  # fmt: skip
        spec: Manifest = {
            "automountServiceAccountToken": bool(options.service),
            "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
                                "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}},
            # Above what a drain may take: the kubelet kills what is still there.
            "terminationGracePeriodSeconds": options.drain_wait_s + 2 * _DRAIN_S,
            "topologySpreadConstraints": [spread],
            "containers": [self._container(pods)],
            "volumes": [*self._volumes(pods)],
        }  # fmt: skip
        if options.service:
            spec["serviceAccountName"] = options.service
        if pods.num_gpus:
            spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        return spec

    def _container(self, pods: PodSet) -> Manifest:
        options, live, ready = self._options, _get("/health/live"), _get("/health/ready")
        if pods.is_frontend:
            live, ready = _get("/health/live", "openai"), _get("/health/ready", "openai")
        container: Manifest = {
            "name": "bireme",
            "image": options.image,
            "command": self._command(pods),
            "env": self._environment(pods),
            "ports": [{"name": name, "containerPort": port} for name, port in _ports(pods).items()],
            "resources": self._resources(pods),
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "startupProbe": ready | {"periodSeconds": 5, "failureThreshold": _START_S // 5, "timeoutSeconds": 5},
            "livenessProbe": live | {"periodSeconds": 10, "failureThreshold": 6, "timeoutSeconds": 5},
            "readinessProbe": ready | {"periodSeconds": 5, "failureThreshold": 2, "timeoutSeconds": 5},
            "volumeMounts": [*self._mounts(pods)],
        }
        if not pods.is_frontend:
            drain = ["python3", "tools/drain.py", "--all", "--wait", str(options.drain_wait_s),
                     "--admin", f"http://127.0.0.1:{ADMIN}", "--admin-key-file", f"{KEYS}/admin.key"]  # fmt: skip
            container["lifecycle"] = {"preStop": {"exec": {"command": drain}}}
        return container

    def _command(self, pods: PodSet) -> list[str]:
        options = self._options
        common = ["--discovery", options.discovery] if options.discovery else []
        keys = ["--api-keys", f"{KEYS}/api-keys"] if options.api_keys else []
        if pods.is_frontend:
            return ["python3", "-m", "bireme.openai", "--recipe", RECIPE, "--host", EVERYWHERE, "--port", str(OPENAI),
                    *common, *keys]  # fmt: skip
        command = [
            "python3", "tools/serve.py", RECIPE, "--health-host", "$(POD_IP)", "--metrics-host", "$(POD_IP)",
            "--admin-port", str(ADMIN), "--admin-key-file", f"{KEYS}/admin.key", "--drain-timeout", str(_DRAIN_S),
            *common,
        ]  # fmt: skip
        if options.discovery:  # the network policy lets the pods of this deployment alone in
            command += ["--grpc-host", "$(POD_IP)", "--triton-without-keys"]
        command += ["--host", EVERYWHERE, *keys] if pods.has_openai else ["--openai-port", "0"]
        settings = [*pods.settings, *options.settings]
        if options.discovery:
            settings.append("kv_events.host=$(POD_IP)")
        if pods.has_openai and not options.api_keys:  # else a page of another site could ask
            settings.append(f"frontend.allowed_hosts={json.dumps(self._hosts(), separators=(',', ':'))}")
        return command + [word for setting in settings for word in ("--set", setting)]

    def _hosts(self) -> list[str]:
        namespace = self._options.namespace or "default"
        named = (self._name, f"{self._name}.{namespace}", f"{self._name}.{namespace}.svc")
        return [*named, f"{named[-1]}.cluster.local", *self._options.hosts]

    def _environment(self, pods: PodSet) -> list[Manifest]:
        variables: list[Manifest] = [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "BIREME_KEY", "valueFrom": {"secretKeyRef": {"name": f"{self._name}-keys", "key": "bireme.key"}}},
        ]
        if self._model_from == "hub":
            token = {"name": f"{self._name}-hub", "key": "token", "optional": True}
            variables.append({"name": "HF_HOME", "value": f"{MODELS}/hub"})
            variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}})
        if pods.is_frontend and not self._options.api_keys:
            hosts = {"frontend": {"allowed_hosts": self._hosts()}}
            variables.append({"name": "BIREME_OVERRIDE", "value": json.dumps(hosts)})
        return variables

    def _resources(self, pods: PodSet) -> Manifest:
        requests = {"cpu": self._options.cpu, "memory": self._options.memory}
        if pods.is_frontend:
            return {"requests": {"cpu": "2", "memory": "2Gi"}}
        if not pods.num_gpus:
            return {"requests": requests}
        return {"requests": requests, "limits": {"nvidia.com/gpu": str(pods.num_gpus)}}

    def _volumes(self, pods: PodSet) -> Iterator[Manifest]:
        yield {"name": "recipe", "configMap": {"name": f"{self._name}-recipe"}}
        yield {"name": "keys", "secret": {"secretName": f"{self._name}-keys", "defaultMode": 0o440}}
        if not pods.is_frontend:
            yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": self._options.shm}}
        if self._model_from != "image":
            yield {"name": "models", "persistentVolumeClaim": {"claimName": f"{self._name}-models"}}

    def _mounts(self, pods: PodSet) -> Iterator[Manifest]:
        yield {"name": "recipe", "mountPath": RECIPE, "readOnly": True}
        yield {"name": "keys", "mountPath": KEYS, "readOnly": True}
        if not pods.is_frontend:
            yield {"name": "shm", "mountPath": SHM}
        if self._model_from != "image":
            yield {"name": "models", "mountPath": MODELS, "readOnly": self._model_from == VOLUME}


_WORKLOADS = {  # by whether an engine spans nodes
    False: {"apiVersion": "apps/v1", "kind": "Deployment"},
    True: {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"},
}
_SCRAPED = {"metrics": METRICS, "openai": OPENAI}
_ADAPTER = {
    "bireme_requests_waiting": "sum(bireme_requests_waiting{<<.LabelMatchers>>}) by (<<.GroupBy>>)",
    "bireme_kv_usage_percent": (
        "100 * sum(bireme_kv_blocks_used{<<.LabelMatchers>>}) by (<<.GroupBy>>)"
        " / sum(bireme_kv_blocks_total{<<.LabelMatchers>>}) by (<<.GroupBy>>)"
    ),
}


def _ports(pods: PodSet) -> dict[str, int]:
    if pods.is_frontend:
        return {"openai": OPENAI}
    ports = {"grpc": GRPC, "metrics": METRICS, "health": HEALTH}
    return {"openai": OPENAI, **ports} if pods.has_openai else ports


def _get(path: str, port: str = "health") -> Manifest:
    return {"httpGet": {"path": path, "port": port}}


def _pods_metric(name: str, average: str) -> Manifest:
    target = {"type": "AverageValue", "averageValue": average}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}


def _adapter_rule(name: str, query: str) -> Manifest:
    resources = {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}}
    series = "bireme_kv_blocks_used" if "usage" in name else name
    return {"seriesQuery": series, "resources": resources, "name": {"as": name}, "metricsQuery": query}
