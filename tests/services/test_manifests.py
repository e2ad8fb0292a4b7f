"""Kubernetes manifests of recipes: strictly valid for three versions, and each name in them is there."""

import functools
import itertools
import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from bireme.config import CHECKOUT
from bireme.discovery.endpoint_slices import PORT_NAME
from bireme.discovery.store import parse_address
from bireme.launch.admin_door import read_key
from bireme.metrics import TABLE
from bireme.recipe_files import load_recipe
from tools import make_manifests, serve
from tools.manifests.objects import ADMIN, METRICS, OPENAI, RECIPE
from tools.manifests.plan import KEYS
from tools.manifests.ranks import SSH_FILES

VERSIONS = ("1.30", "1.33", "1.37")
THEIRS, KUSTOMIZE = ("ServiceMonitor", "InferencePool", "LeaderWorkerSet"), ("Kustomization", "Component")
ETCD = ("--discovery", "etcd://etcd:2379")
SLICES = ("--namespace", "llm", "--discovery", "kubernetes")
CASES = {
    "tiny": ("--cpu-only",),
    "tiny-chat": ("--cpu-only", "--api-keys", "KEYS"),
    "qwen3": ("--replicas", "3", "--gateway", "picker"),
    "qwen3-disagg": ("--apart", "--namespace", "llm", "--gateway", "picker"),
    "llama-3.1-8b-disagg": ("--apart", *ETCD, "--api-keys", "KEYS", "--namespace", "llm"),
    "tiny-vlm-agg": ("--cpu-only",),
    "tiny-embedding": ("--cpu-only",),
    "gemma3-vswa-disagg": SLICES,
    "deepseek-r1-wide-ep": (*SLICES, "--replicas", "2", "--gateway", "picker"),
    "deepseek-r1-disagg": ("--apart", "--namespace", "llm", "--gpus-per-node", "4", "--api-keys", "KEYS"),
}


@pytest.fixture(scope="module", params=CASES)
def made(request, tmp_path_factory):
    """The folder of a case, and its objects but kustomize's."""
    folder = tmp_path_factory.mktemp("manifests")
    (folder / "keys").write_text("{}")
    arguments = [word.replace("KEYS", str(folder / "keys")) for word in CASES[request.param]]
    recipe = str(CHECKOUT / "recipes" / request.param)
    assert make_manifests.main([recipe, "--image", "example/bireme:1", "--out", str(folder / "out"), *arguments]) == 0
    return folder / "out"


@functools.cache
def read(path):
    return list(yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader))  # it is safe, too


def objects_of(folder):
    return [one for path in sorted(folder.rglob("*.yaml")) for one in read(path) if one["kind"] not in KUSTOMIZE]


def deployments(folder):
    return {one["metadata"]["name"]: one for one in objects_of(folder) if one["kind"] == "Deployment"}


def groups(folder):
    return {one["metadata"]["name"]: one for one in objects_of(folder) if one["kind"] == "LeaderWorkerSet"}


def templates(folder):
    """Return the pods' templates by workload; of a group that of its leader, and of the others as NAME-ranks."""
    found = {name: one["spec"]["template"] for name, one in deployments(folder).items()}
    for name, one in groups(folder).items():
        found[name] = one["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        found[f"{name}-ranks"] = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return found


def container(template):
    return template["spec"]["containers"][0]


def pod_of(name, template):
    return {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": name} | template["metadata"]}


def program_of(template):
    """Return what serve.py or the frontend is started with, without what starts ranks."""
    words = container(template)["command"]
    return words[words.index("trtllm-llmapi-launch") + 1 :] if words[0] == "mpirun" else words


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_strictly_valid(made, version):
    for one in objects_of(made):
        if one["kind"] not in THEIRS:
            kubernetes_validate.validate(one, version, strict=True)
    for name, template in templates(made).items():  # also those within a LeaderWorkerSet
        kubernetes_validate.validate(pod_of(name, template), version, strict=True)


@pytest.mark.parametrize("kind", THEIRS)
def test_so_is_what_others_have_defined(made, kind):
    """By the structure that its own project publishes."""
    schema = json.loads((Path(__file__).parent / "crds" / f"{kind}.json").read_text())
    for one in objects_of(made):
        if one["kind"] == kind:
            jsonschema.validate(one, schema)
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(one | {"spec": one["spec"] | {"selectors": {}}}, schema)


def test_the_check_is_strict(made):
    pod = pod_of("pod", next(iter(templates(made).values())))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            pod | {"spec": pod["spec"] | {"terminationGracePeriod": 1}}, VERSIONS[-1], strict=True
        )


def test_each_config_secret_and_claim_that_a_pod_names_is_there(made):
    there = {(one["kind"], one["metadata"]["name"]) for one in objects_of(made)}
    for template in templates(made).values():
        if account := template["spec"].get("serviceAccountName"):
            assert ("ServiceAccount", account) in there
        for volume in template["spec"]["volumes"]:
            for kind, field in (
                ("ConfigMap", "name"),
                ("Secret", "secretName"),
                ("PersistentVolumeClaim", "claimName"),
            ):
                source = volume.get(kind[0].lower() + kind[1:], {})
                assert not source or (kind, source[field]) in there
        mounts = {mount["name"] for mount in container(template)["volumeMounts"]}
        assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}


def test_services_budgets_and_scalers_select_pods_that_there_are(made):
    workloads = deployments(made) | groups(made)
    labels = [one["metadata"]["labels"] for one in templates(made).values()]
    for one in objects_of(made):
        spec = one.get("spec", {})
        selector = (
            spec.get("selector", {}) if one["kind"] in ("Service", "PodDisruptionBudget", "InferencePool") else {}
        )
        selector = selector.get("matchLabels", selector)
        assert any(selector.items() <= of_pod.items() for of_pod in labels)
        if one["kind"] == "HorizontalPodAutoscaler":
            target = workloads[spec["scaleTargetRef"]["name"]]
            assert all(target[field] == spec["scaleTargetRef"][field] for field in ("apiVersion", "kind"))


def test_a_kustomization_names_files_that_are_there_and_leaves_none_out(made):
    named = set()
    for path in made.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        for name in itertools.chain(content["resources"], content.get("components", ())):
            target = (path.parent / name).resolve()
            assert target.exists() and (target.is_file() or (target / "kustomization.yaml").exists())
            named.add(target)
    files = {path.resolve() for path in made.rglob("*.yaml") if path.name != "kustomization.yaml"}
    assert files <= named


def test_what_pods_run_is_taken_by_the_programs(made):
    """With the recipe of the ConfigMap in its place."""
    recipe = made.parent / "recipe"
    recipe.mkdir(exist_ok=True)
    for name, text in next(one for one in objects_of(made) if one["kind"] == "ConfigMap")["data"].items():
        (recipe / name).write_text(text)
    for name, template in templates(made).items():
        words = [word.replace(RECIPE, str(recipe)) for word in program_of(template)]
        if words[1] == "tools/serve.py":
            options = serve.parse([word.replace("$(POD_IP)", "127.0.0.1") for word in words[2:]])
            assert options.admin_port == ADMIN and load_recipe(options.recipe).workers
        else:
            assert words[:3] == ["python3", "-m", "bireme.openai"] or name.endswith("-ranks")


def test_a_pod_that_ends_drains_first_within_its_grace_period(made):
    for name, template in templates(made).items():
        pod = template["spec"]
        if (hook := container(template).get("lifecycle")) and not name.endswith("-ranks"):
            command = hook["preStop"]["exec"]["command"]
            assert command[-1] == f"{KEYS}/admin.key" and f"http://127.0.0.1:{ADMIN}" in command
            assert pod["terminationGracePeriodSeconds"] > int(command[command.index("--wait") + 1])


def test_pods_run_without_rights(made):
    reads_slices = bool(of_kind(made, "Role"))
    for template in templates(made).values():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] == reads_slices
        own = container(template)["securityContext"]
        assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def of_kind(folder, kind):
    return [one for one in objects_of(folder) if one["kind"] == kind]


def test_who_finds_pods_by_endpoint_slices_may_read_them_and_nothing_else(made):
    """The names and the port that bireme/discovery/endpoint_slices.py reads are those of the Service."""
    for role, binding, account in zip(
        *(of_kind(made, kind) for kind in ("Role", "RoleBinding", "ServiceAccount")), strict=True
    ):
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        ]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "llm"}
        ]
        services = {one["metadata"]["name"]: one["spec"] for one in of_kind(made, "Service")}
        for name, template in templates(made).items():
            words = container(template)["command"]
            if "--discovery" not in words:
                assert name.endswith("-ranks")
                continue
            block = parse_address(words[words.index("--discovery") + 1])
            spec = services[block["service"]]
            (port,) = spec["ports"]
            assert block["backend"] == "kubernetes" and spec["clusterIP"] == "None" and port["name"] == PORT_NAME
            ports = {one["name"]: one["containerPort"] for one in container(template)["ports"]}
            assert ports.get(port["targetPort"], port["port"]) == port["port"]
            assert spec["selector"].items() <= template["metadata"]["labels"].items()


def test_the_network_policy_lets_pods_ask_each_other_and_the_api_server(made):
    """Nothing that goes out is bounded; what comes in from others is OpenAI's port and metrics."""
    (policy,) = of_kind(made, "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    own = {"podSelector": policy["spec"]["podSelector"]}
    assert {"from": [own]} in policy["spec"]["ingress"]
    opened = [port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())]
    assert opened == [OPENAI, METRICS]
    for template in templates(made).values():
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_pods_are_scaled_by_metrics_that_there_are(made):
    (rules,) = (one for one in of_kind(made, "ConfigMap") if one["metadata"]["name"].endswith("-adapter-rules"))
    served = {rule["name"]["as"]: rule for rule in json.loads(rules["data"]["config.yaml"])["rules"]}
    for rule in served.values():
        for name in re.findall(r"bireme_\w+", rule["metricsQuery"] + " " + rule["seriesQuery"]):
            assert name in TABLE
    for scaler in of_kind(made, "HorizontalPodAutoscaler"):
        assert {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]} == served.keys()


def test_an_engine_over_nodes_is_a_group_whose_leader_starts_the_ranks(made):
    for name, group in groups(made).items():
        spec = group["spec"]["leaderWorkerTemplate"]
        words = container(spec["leaderTemplate"])["command"]
        hosts = words[words.index("--host") + 1].split(",")
        slots = [int(host.rpartition(":")[2]) for host in hosts]
        assert hosts[0].startswith(f"$(POD_NAME).{name}:") and hosts[1].startswith(f"$(POD_NAME)-1.{name}:")
        assert len(hosts) == spec["size"] > 1 and sum(slots) == int(words[words.index("-np") + 1])
        for template in (spec["leaderTemplate"], spec["workerTemplate"]):
            assert container(template)["resources"]["limits"]["nvidia.com/gpu"] == str(slots[0])
        assert "supervisor.max_restarts=0" in words
        keys = yaml.safe_load((made / "base" / "secret.yaml").read_text())["stringData"]
        assert keys.keys() >= set(SSH_FILES) and "PRIVATE KEY" in keys["ssh"]
        assert keys["ssh.hosts"] == f"* {keys['ssh.pub']}"


def test_keys_are_made_once_and_nobody_else_reads_them(made):
    path = made / "base" / "secret.yaml"
    assert path.stat().st_mode & 0o777 == 0o600 and (made / ".gitignore").read_text() == "secret.yaml\n"
    keys = yaml.safe_load(path.read_text())["stringData"]
    (made.parent / "admin.key").write_text(keys["admin.key"])
    assert read_key(made.parent / "admin.key") and len(bytes.fromhex(keys["bireme.key"])) == 32


def test_written_again_it_has_the_same_keys(tmp_path):
    arguments = ["recipes/tiny", "--image", "i", "--out", str(tmp_path), "--cpu-only"]
    assert make_manifests.main(arguments) == 0
    before = (tmp_path / "base" / "secret.yaml").read_text()
    assert make_manifests.main(arguments) == 0
    assert (tmp_path / "base" / "secret.yaml").read_text() == before


def test_prefill_decode_and_frontends_are_apart_where_that_is_asked_for(tmp_path):
    arguments = ["recipes/qwen3-disagg", "--image", "i", "--out", str(tmp_path), "--apart", *ETCD, "--replicas", "2"]
    assert make_manifests.main(arguments) == 0
    found = deployments(tmp_path)
    assert {name: one["spec"]["replicas"] for name, one in found.items()} == {
        "qwen3-disagg-prefill": 2,
        "qwen3-disagg-decode": 2,
        "qwen3-disagg-frontend": 2,
    }
    assert "workers.decode.replicas=0" in container(found["qwen3-disagg-prefill"]["spec"]["template"])["command"]
    limits = container(found["qwen3-disagg-decode"]["spec"]["template"])["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("recipes/nowhere",), "recipes/nowhere"),
        (
            ("recipes/deepseek-r1-wide-ep", "--gpus-per-node", "6"),
            "an engine takes 16 GPUs, which don't fill nodes of 6",
        ),
        (("recipes/deepseek-r1-disagg", "--gpus-per-node", "2"), "give prefill and decode pods of their own (--apart)"),
        (("recipes/qwen3-disagg", "--gpus-per-node", "1"), "take 2 GPUs together, a node has 1"),
        (
            ("recipes/tiny", "--apart", *ETCD),
            "cache_transceiver_config.backend is DEFAULT; its KV stays within one pod",
        ),
        (("recipes/qwen3-disagg", "--apart"), "--namespace: missing; the pods' right to read EndpointSlices"),
        (("recipes/qwen3-disagg", "--apart", "--discovery", "/srv/x"), "pods find each other by kubernetes or etcd://"),
        (("recipes/qwen3", "--discovery", "kubernetes://mine"), "the Service qwen3-workers is made for it"),
        (
            ("recipes/deepseek-r1-wide-ep", "--set", 'served_model_name="a b"'),
            "trtllm-llmapi-launch splits its command at blanks",
        ),
        (("recipes/tiny-video", "--apart", *ETCD), "video_diffusion can't have pods of its own"),
        (("recipes/tiny", "--name", "Tiny_1"), "--name Tiny_1: small letters, digits"),
        (("recipes/tiny", "--set", "limits"), "--set limits: write KEY=VALUE"),
        (("recipes/tiny", "--set", "model=/srv/my-model"), "/srv/my-model is a folder of this machine"),
        (("recipes/tiny", "--set", "limits.max_n=0"), "limits.max_n"),
        (("recipes/tiny", "--api-keys", "nowhere.json"), "--api-keys nowhere.json: it can't be read"),
    ],
)
def test_what_no_cluster_can_run_is_refused_by_name(tmp_path, capsys, arguments, told):
    assert make_manifests.main([*arguments, "--image", "i", "--out", str(tmp_path / "out")]) == make_manifests.WRONG
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_recipe_is_written_and_its_pods_are_valid(tmp_path):
    for folder in sorted(Path(CHECKOUT / "recipes").iterdir()):
        out = tmp_path / folder.name
        assert make_manifests.main([str(folder), "--image", "i", "--out", str(out)]) == 0
        for version, (name, template) in itertools.product(VERSIONS, templates(out).items()):
            kubernetes_validate.validate(pod_of(name, template), version, strict=True)


def test_a_machine_without_ssh_keygen_is_told_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["recipes/deepseek-r1-wide-ep", "--image", "i", "--out", str(tmp_path / "out")]
    assert make_manifests.main(arguments) == make_manifests.WRONG
    assert "install openssh-client" in capsys.readouterr().err and not (tmp_path / "out").exists()
