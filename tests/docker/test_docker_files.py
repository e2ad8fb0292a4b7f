"""The files of docker/: the alerts name metrics that exist, and nothing names a file that doesn't."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import tomllib

import pytest
import yaml

from bireme.config import CHECKOUT
from bireme.kv.compile import KERNELS
from bireme.launch.ports import LOOPBACK, Hosts
from bireme.metrics import TABLE
from tests.docker.dockerfile_steps import steps_of
from tests.docker.expressions import metrics_of
from tools import serve

DOCKER = CHECKOUT / "docker"
FILES_WITH_EXAMPLES = sorted([*DOCKER.glob("Dockerfile*"), *DOCKER.glob("*.yaml"), *(CHECKOUT / "docs").glob("*.md")])
STEPS = sorted([*DOCKER.glob("Dockerfile*"), *DOCKER.glob("*.sh")])
RULES = yaml.safe_load((DOCKER / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]


@pytest.mark.parametrize("expression", [rule["expr"] for rule in RULES])
def test_every_metric_that_is_alerted_exists(expression):
    found = metrics_of(expression)
    assert found <= TABLE.keys() and (found or expression.startswith("up{"))  # Prometheus's own


def test_each_alert_has_a_unit_test_of_its_firing_and_of_the_moment_before():
    units = yaml.safe_load((DOCKER / "prometheus" / "alerts_test.yaml").read_text())["tests"]
    checks = [check for unit in units for check in unit["alert_rule_test"]]
    for rule in RULES:
        firing, silent = (
            [
                check
                for check in checks
                if check["alertname"] == rule["alert"] and bool(check.get("exp_alerts")) is fires
            ]
            for fires in (True, False)
        )
        assert firing and silent, f"{rule['alert']} has none in docker/prometheus/alerts_test.yaml"
        labels, texts = rule["labels"], rule["annotations"]
        assert all(labels.items() <= one["exp_labels"].items() for check in firing for one in check["exp_alerts"])
        assert all(texts.keys() == one["exp_annotations"].keys() for check in firing for one in check["exp_alerts"])


def test_metrics_that_an_alert_matches_by_labels_have_them():
    for rule in RULES:
        for labels in re.findall(r"\bon \(([^)]*)\)", rule["expr"]):
            own = set(labels.split(", ")) - {"instance"}  # Prometheus's own
            assert all(own <= set(TABLE[name].labels) for name in metrics_of(rule["expr"])), rule["alert"]


def test_a_worker_that_was_put_to_sleep_is_not_down():
    (down,) = [rule["expr"] for rule in RULES if rule["alert"] == "EngineDown"]
    assert down == "bireme_engine_up == 0 unless on (instance, worker) bireme_engine_asleep == 1"


def test_files_that_compose_mounts_and_builds_from_exist():
    for file in DOCKER.glob("compose*.yaml"):
        for service in yaml.safe_load(file.read_text())["services"].values():
            sources = [volume.split(":")[0] for volume in service.get("volumes", []) if volume.startswith("./")]
            assert all((DOCKER / source).exists() for source in sources)
            named = re.sub(r"\$\{\w+:-(.*)\}", r"\1", service.get("build", {}).get("dockerfile", "."))
            assert (CHECKOUT / named).exists()


def arguments_of(file):
    """Return a Dockerfile's build arguments with their defaults."""
    return dict(text.split("=", 1) for kind, text in steps_of(file) if kind == "ARG")


@pytest.mark.parametrize("file", sorted(DOCKER.glob("Dockerfile*")), ids=lambda file: file.name)
def test_images_run_without_root_and_open_the_openai_port_alone(file):
    text = file.read_text()
    assert re.search(r"^USER 10001$", text, re.M) and re.search(r"^EXPOSE 9000$", text, re.M)
    (base,) = re.findall(r"^FROM (\S+)$", text.replace("${BASE}", arguments_of(file).get("BASE", "")), re.M)
    assert re.search(r"^\S+:[\w.${}-]+$", base) and ":latest" not in text
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    options = serve.parse(json.loads(entry)[2:])
    assert (options.host, serve.hosts_of(options), options.health_host) == ("0.0.0.0", Hosts(), LOOPBACK)


def test_compose_publishes_on_this_machine_alone_and_no_port_of_triton():
    for file in DOCKER.glob("compose*.yaml"):
        for name, service in yaml.safe_load(file.read_text())["services"].items():
            published = service.get("ports", [])
            assert all(port.startswith("127.0.0.1:") for port in published), (file.name, name)
            assert not [port for port in published if re.search(r":800\d$", port)], (file.name, name)


def test_prometheus_of_compose_reaches_the_metrics_that_it_asks_for():
    scraped = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"][0]
    targets = [target for config in scraped["static_configs"] for target in config["targets"]]
    assert targets == ["bireme:8002", "bireme:9000"]
    for file in DOCKER.glob("compose*.yaml"):
        command = yaml.safe_load(file.read_text())["services"]["bireme"]["command"]
        options = serve.parse(command)
        assert serve.hosts_of(options) == Hosts(metrics="0.0.0.0"), file.name
        assert 'frontend.allowed_hosts=["bireme"]' in options.set, file.name


@pytest.mark.parametrize("file", FILES_WITH_EXAMPLES, ids=lambda file: file.name)
def test_no_example_of_docker_publishes_a_port_of_triton(file):
    assert not re.findall(r"-p (?!127\.)[\d.:-]*800\d", file.read_text())


@pytest.mark.parametrize(
    "file", [file for file in STEPS if "pip install" in file.read_text()], ids=lambda file: file.name
)
def test_whatever_places_requests_has_compiled_code_discovery_and_both_event_planes(file):
    installed = [set(found.split(",")) for found in re.findall(r"(?:\[|extras=)([a-z0-9,$-]+)", file.read_text())]
    assert any("openai" in extras for extras in installed) or "into_environment.sh\n" in file.read_text()
    assert all({"kv", "etcd", "nats"} <= extras for extras in installed if "openai" in extras)


@pytest.mark.parametrize(
    ("name", "engine", "nixl"),
    [
        ("Dockerfile", "torch", "nixl"),
        ("Dockerfile.triton", "torch", "nixl-cu13"),
        ("Dockerfile.trtllm", "torch", "nixl-cu13"),
        ("Dockerfile.trtllm-release", "torch", "nixl-cu13"),
        ("into_environment.sh", "$extras", "$nixl"),
    ],
)
def test_every_environment_with_an_engine_moves_rows_between_hosts(name, engine, nixl):
    """Into the environment that into_environment.sh installs into, TensorRT-LLM has come with the image."""
    installed = [set(found.split(",")) for found in re.findall(r"\[([a-z0-9,$-]+)\]", (DOCKER / name).read_text())]
    with_engine = [extras for extras in installed if engine in extras]
    assert with_engine and all(nixl in extras for extras in with_engine)


@pytest.mark.parametrize("file", STEPS, ids=lambda file: file.name)
def test_every_extra_that_is_installed_is_one_of_the_package_s(file):
    extras = set(tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    text = file.read_text()
    installed = [
        one for found in re.findall(r"(?:\.\[|\}\[|extras=|nixl=\")([a-z0-9,$-]+)", text) for one in found.split(",")
    ]
    assert {one for one in installed if not one.startswith("$")} <= extras
    assert installed or not re.search(r"pip install (?:-e|--editable)", text)


def test_nvidia_s_triton_image_takes_the_steps_that_are_built_and_served_here():
    """docker/Dockerfile is (make image): a line of the other that is not its own is as good as what was built."""
    own, other = (steps_of(DOCKER / name) for name in ("Dockerfile", "Dockerfile.triton"))
    lines = {kind: [text for k, text in other if k == kind and (kind, text) not in own] for kind, _ in other}
    assert lines.pop("FROM") == ["nvcr.io/nvidia/tritonserver:${TRITON_TAG}"]
    assert lines.pop("ARG") == [f"TRITON_TAG={arguments_of(DOCKER / 'Dockerfile.triton')['TRITON_TAG']}"]
    (variables,) = lines.pop("ENV")
    assert ("ENV", re.sub(r"\s+BIREME_TRITONSERVER=\S+$", "", variables)) in own
    packages, environment, torch, bireme, user = lines.pop("RUN")
    assert "apt-get install -y --no-install-recommends python3-venv" in packages
    assert (environment, torch) == ("python3 -m venv /opt/venv", 'pip install "torch==${TORCH_VERSION}"')
    (extras,) = re.findall(r"^pip install -e \"\.\[(.*)\]\"$", bireme)
    assert ("RUN", f'pip install -e ".[server,{extras.replace("nixl-cu13", "nixl")}]"') in own
    theirs = "(id -u bireme >/dev/null 2>&1 || useradd --create-home --uid 10001 bireme)"
    assert ("RUN", user.replace(theirs, "useradd --create-home --uid 10001 bireme")) in own
    (health,) = lines.pop("HEALTHCHECK")
    assert ("HEALTHCHECK", health.replace("600s", "120s")) in own
    assert {kind for kind, texts in lines.items() if texts} == set()


def test_an_image_gets_every_file_of_the_checkout_and_nothing_that_git_ignores():
    patterns = (CHECKOUT / ".dockerignore").read_text().split("\n")
    rules = [one for one in patterns if one and not one.startswith("#")]
    tracked = subprocess.run(["git", "ls-files"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    assert [name for name in tracked.splitlines() if is_ignored(name, rules) and not name.startswith(".ci/")] == []
    ignored = [
        line.strip("/") for line in (CHECKOUT / ".gitignore").read_text().splitlines() if line[:1] not in ("#", "")
    ]
    made = [name.replace("*", "x") for name in ignored] + ["bireme/x/__pycache__/x.pyc", "x/bireme.egg-info"]
    assert [name for name in made if not is_ignored(name, rules)] == []


def is_ignored(name, rules):
    """Return whether docker leaves a path out: a rule is a path from the root, `**/` any folders before it."""
    parts = name.split("/")
    paths = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(
        fnmatch.fnmatchcase(path.rpartition("/")[2] if rule.startswith("**/") else path, rule.removeprefix("**/"))
        for rule in rules
        for path in paths
    )


@pytest.mark.parametrize("file", sorted(DOCKER.glob("Dockerfile*")), ids=lambda file: file.name)
def test_an_image_s_own_user_keeps_all_compiled_code(file):
    steps = steps_of(file)
    as_user = [text for kind, text in steps[steps.index(("USER", "10001")) :] if kind == "RUN"]
    assert any("-m bireme.kv.compile" in text for text in as_user)


def test_what_is_compiled_beforehand_is_every_module_of_kernels():
    files = {path.stem for path in (CHECKOUT / "bireme" / "kv").rglob("*_kernels.py")}
    assert {name.rpartition(".")[2] for name in KERNELS} == files
    assert "-m bireme.kv.compile" in (CHECKOUT / "tools" / "setup.sh").read_text()


def test_prometheus_reads_the_server_and_the_frontend():
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text())
    targets = [target for job in config["scrape_configs"] for one in job["static_configs"] for target in one["targets"]]
    assert targets == ["bireme:8002", "bireme:9000"] and config["rule_files"] == ["alerts.yaml"]
