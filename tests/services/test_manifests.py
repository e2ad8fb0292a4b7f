"""Kubernetes manifests of recipes: strictly valid for three versions, and each name in them is there."""

import itertools
import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from bireme.config import CHECKOUT
from bireme.launch.admin_door import read_key
from bireme.recipe_files import load_recipe
from tools import make_manifests, serve
from tools.manifests.objects import ADMIN, KEYS, RECIPE

VERSIONS = ("1.30", "1.33", "1.37")
THEIRS, KUSTOMIZE = ("ServiceMonitor", "InferencePool"), ("Kustomization", "Component")
ETCD = ("--discovery", "etcd://etcd:2379")
CASES = {
    "tiny": ("--cpu-only",),
    "tiny-chat": ("--cpu-only", "--api-keys", "KEYS"),
    "qwen3": ("--replicas", "3", "--gateway", "picker"),
    "qwen3-disagg": ("--apart", *ETCD, "--gateway", "picker"),
    "llama-3.1-8b-disagg": ("--apart", *ETCD, "--api-keys", "KEYS", "--namespace", "llm"),
    "tiny-vlm-agg": ("--cpu-only",),
    "tiny-embedding": ("--cpu-only",),
    "gemma3-vswa-disagg": (),
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


def objects_of(folder):
    paths = sorted(folder.rglob("*.yaml"))
    return [one for path in paths for one in yaml.safe_load_all(path.read_text()) if one["kind"] not in KUSTOMIZE]


def deployments(folder):
    return {one["metadata"]["name"]: one for one in objects_of(folder) if one["kind"] == "Deployment"}


def container(deployment):
    return deployment["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_strictly_valid(made, version):
    for one in objects_of(made):
        if one["kind"] not in THEIRS:
            kubernetes_validate.validate(one, version, strict=True)


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
    deployment = next(iter(deployments(made).values()))
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


def test_each_config_secret_and_claim_that_a_pod_names_is_there(made):
    there = {(one["kind"], one["metadata"]["name"]) for one in objects_of(made)}
    for deployment in deployments(made).values():
        for volume in deployment["spec"]["template"]["spec"]["volumes"]:
            for kind, field in (
                ("ConfigMap", "name"),
                ("Secret", "secretName"),
                ("PersistentVolumeClaim", "claimName"),
            ):
                source = volume.get(kind[0].lower() + kind[1:], {})
                assert not source or (kind, source[field]) in there
        mounts = {mount["name"] for mount in container(deployment)["volumeMounts"]}
        assert mounts == {volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}


def test_services_budgets_and_scalers_select_pods_that_there_are(made):
    found = deployments(made)
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in found.values()]
    for one in objects_of(made):
        spec = one.get("spec", {})
        selector = (
            spec.get("selector", {}) if one["kind"] in ("Service", "PodDisruptionBudget", "InferencePool") else {}
        )
        selector = selector.get("matchLabels", selector)
        assert any(selector.items() <= of_pod.items() for of_pod in labels)
        if one["kind"] == "HorizontalPodAutoscaler":
            assert spec["scaleTargetRef"]["name"] in found


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
    for deployment in deployments(made).values():
        words = [word.replace(RECIPE, str(recipe)) for word in container(deployment)["command"]]
        if words[1] == "tools/serve.py":
            options = serve.parse([word.replace("$(POD_IP)", "127.0.0.1") for word in words[2:]])
            assert options.admin_port == ADMIN and load_recipe(options.recipe).workers


def test_a_pod_that_ends_drains_first_within_its_grace_period(made):
    for deployment in deployments(made).values():
        pod = deployment["spec"]["template"]["spec"]
        if hook := container(deployment).get("lifecycle"):
            command = hook["preStop"]["exec"]["command"]
            assert command[-1] == f"{KEYS}/admin.key" and f"http://127.0.0.1:{ADMIN}" in command
            assert pod["terminationGracePeriodSeconds"] > int(command[command.index("--wait") + 1])


def test_pods_run_without_rights(made):
    for deployment in deployments(made).values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        own = container(deployment)["securityContext"]
        assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


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
    assert "workers.decode.replicas=0" in container(found["qwen3-disagg-prefill"])["command"]
    assert container(found["qwen3-disagg-decode"])["resources"]["limits"] == {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("recipes/nowhere",), "recipes/nowhere"),
        (("recipes/deepseek-r1-wide-ep",), "an engine takes 16 GPUs, a node has 8"),
        (("recipes/qwen3-disagg", "--gpus-per-node", "1"), "take 2 GPUs together, a node has 1"),
        (
            ("recipes/tiny", "--apart", *ETCD),
            "cache_transceiver_config.backend is DEFAULT; its KV stays within one pod",
        ),
        (("recipes/qwen3-disagg", "--apart"), "pods find each other by etcd://host:2379"),
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


def test_every_recipe_is_written_or_refused_with_its_reason(tmp_path, capsys):
    """Those over several nodes are Slurm's; video's model is a pipeline on one GPU."""
    refused = {}
    for folder in sorted(Path(CHECKOUT / "recipes").iterdir()):
        out = str(tmp_path / folder.name)
        if make_manifests.main([str(folder), "--image", "i", "--out", out]):
            refused[folder.name] = capsys.readouterr().err
    assert refused.keys() <= {"deepseek-r1-wide-ep", "deepseek-r1-disagg", "deepseek-r1-mtp", "deepseek-r1"}
    assert all(re.search(r"GPUs.*node", reason) for reason in refused.values()), refused
