"""Write Kubernetes manifests for a recipe: a kustomize base, and components for what a cluster may have.

    python tools/make_manifests.py recipes/qwen3 --image registry/bireme:1 --out k8s
    python tools/make_manifests.py recipes/qwen3-disagg --image registry/bireme:1 --out k8s \\
        --apart --namespace llm --frontends 2                     # prefill and decode in pods of their own
    kubectl apply -k k8s                                           # or: -k k8s/with/monitoring, after a look at it

Without --apart each pod serves the whole recipe. Pods of one model find each other by their Service's EndpointSlices
(--discovery kubernetes, the default with --apart) or by etcd. An engine over several nodes is a LeaderWorkerSet.

Keys are made once (k8s/base/secret.yaml, mode 0600, which .gitignore leaves out) and kept when the manifests are
written again. No cluster is asked; docs/kubernetes.md has what was checked.

Exit codes: 0; 2 the recipe can't run so, or an option is wrong.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT
from bireme.errors import ConfigError
from bireme.launch.override import add_settings
from bireme.private_files import replace_file
from bireme.recipe_files import load_recipe
from tools.manifests.objects import Manifest, Objects
from tools.manifests.plan import HUB, Options, config_files, model_source, plan, unlike_settings
from tools.manifests.ranks import SSH_FILES

WRONG = 2
_FILES = {
    "ConfigMap": "recipe",
    "PersistentVolumeClaim": "models",
    "NetworkPolicy": "network-policy",
    "ServiceAccount": "rights",
    "Role": "rights",
    "RoleBinding": "rights",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        written = write(options_of(options), Path(options.out))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return WRONG
    except OSError as error:
        print(f"--out {options.out}: can't be written ({error})", file=sys.stderr)
        return WRONG
    print("\n".join(str(path) for path in written))
    return 0


def write(options: Options, folder: Path) -> list[Path]:
    """Return the files. Raises ConfigError, OSError."""
    unlike_settings(options.settings)
    recipe = load_recipe(options.recipe, add_settings("", list(options.settings)))
    sets, model_from = plan(recipe, options), model_source(recipe, CHECKOUT)
    api_keys = _read_keys(options.api_keys) if options.api_keys else ""
    secret = folder / "base" / "secret.yaml"
    keys = _keys(secret, api_keys, any(one.spans_nodes for one in sets))
    objects = Objects(options, sets, config_files(Path(recipe.folder)), model_from)
    components = {
        "network-policy": objects.network_policy(),
        "autoscaling": objects.autoscaling(),
        "monitoring": objects.monitoring(),
    }
    if options.picker:
        components["gateway"] = objects.gateway()
    written = _write_base(folder / "base", objects.base())
    replace_file(secret, _text(objects.secret(keys)).encode())
    written.append(secret)
    for name, found in components.items():
        written += _write_component(folder / "components" / name, found)
    written.append(_write(folder / "kustomization.yaml", [_kustomization(["base"], ["components/network-policy"])]))
    for name in components.keys() - {"network-policy"}:
        every = [f"../../components/{part}" for part in ("network-policy", name)]
        written.append(_write(folder / "with" / name / "kustomization.yaml", [_kustomization(["../../base"], every)]))
    (folder / ".gitignore").write_text("secret.yaml\n")
    if model_from == HUB:
        print(f"# gated models: kubectl create secret generic {options.name}-hub --from-literal=token=hf_...")
    return written


def _read_keys(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys {path}: it can't be read ({error})") from error


def _write_base(folder: Path, objects: Iterable[Manifest]) -> list[Path]:
    files: dict[str, list[Manifest]] = {}
    for one in objects:
        kind, own = one["kind"], one["metadata"]["name"]
        name = own if kind in ("Deployment", "LeaderWorkerSet", "PodDisruptionBudget") else _FILES.get(kind, "services")
        files.setdefault(f"{name}.yaml", []).append(one)
    written = [_write(folder / name, found) for name, found in files.items()]
    return [*written, _write(folder / "kustomization.yaml", [_kustomization([*files, "secret.yaml"])])]


def _write_component(folder: Path, objects: Iterable[Manifest]) -> list[Path]:
    path = _write(folder / "objects.yaml", list(objects))
    form = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    component = _kustomization(["objects.yaml"]) | form
    return [path, _write(folder / "kustomization.yaml", [component])]


def _keys(path: Path, api_keys: str, has_ranks: bool) -> dict[str, str]:
    """Return the secret's content: what is there stays. `has_ranks`: mpirun reaches other nodes by ssh."""
    kept = yaml.safe_load(path.read_text())["stringData"] if path.exists() else {}
    keys = {"bireme.key": secrets.token_hex(32), "admin.key": secrets.token_hex(32)}
    if has_ranks:
        keys |= {name: kept[name] for name in SSH_FILES} if kept.keys() >= set(SSH_FILES) else _ssh_keys()
    keys |= {name: value for name, value in kept.items() if name in keys}
    return keys | ({"api-keys": api_keys} if api_keys else {})


def _ssh_keys() -> dict[str, str]:
    """Return one pair, of hosts and of who may log in. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ssh")
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bireme", "-f", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(
                f"ssh-keygen: it made no key ({error}), by which mpirun starts the ranks of other nodes; install"
                " openssh-client"
            ) from error
        public = path.with_suffix(".pub").read_text()
        return dict(zip(SSH_FILES, (path.read_text(), public, f"* {public}"), strict=True))


def _kustomization(resources: Sequence[str], components: Sequence[str] = ()) -> Manifest:
    form: Manifest = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    form["resources"] = list(resources)
    return form | ({"components": list(components)} if components else {})


def _write(path: Path, objects: Sequence[Manifest]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("---\n".join(map(_text, objects)))
    return path


class _Dumper(yaml.SafeDumper):
    """Without anchors, and with files as they are."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(one: Manifest) -> str:
    return yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=120)


def _lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _lines)


def options_of(given: argparse.Namespace) -> Options:
    name = given.name or Path(given.recipe).resolve().name.replace(".", "-").replace("_", "-").lower()
    discovery = given.discovery or ("kubernetes" if given.apart else "")
    return Options(
        recipe=given.recipe,
        image=given.image,
        name=name,
        namespace=given.namespace,
        apart=given.apart,
        discovery=f"kubernetes://{name}-workers" if discovery == "kubernetes" else discovery,
        replicas=given.replicas,
        frontends=given.frontends,
        on_cpu=given.cpu_only,
        gpus_per_node=given.gpus_per_node,
        drain_wait_s=given.drain_wait,
        cpu=given.cpu,
        memory=given.memory,
        shm=given.shm,
        storage=given.storage,
        storage_class=given.storage_class,
        picker=given.gateway,
        api_keys=given.api_keys,
        hosts=tuple(given.allowed_host),
        settings=tuple(given.set),
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="folder with recipe.yaml")
    parser.add_argument("--image", required=True, metavar="NAME", help="that docker/ makes, in a registry of yours")
    parser.add_argument("--out", required=True, metavar="FOLDER")
    parser.add_argument("--name", default="", help="of the deployment; default: the recipe's")
    parser.add_argument("--namespace", default="", help="default: that of kubectl")
    parser.add_argument("--apart", action="store_true", help="prefill, decode and frontends in pods of their own")
    parser.add_argument(
        "--discovery", default="", metavar="ADDRESS",
        help="by which pods of one model find each other: kubernetes or etcd://host:2379; default with --apart:"
        " kubernetes",
    )  # fmt: skip
    parser.add_argument("--replicas", type=_positive, default=1, metavar="N", help="pods; with --apart a factor")
    parser.add_argument("--frontends", type=_positive, default=2, metavar="N", help="with --apart")
    parser.add_argument("--cpu-only", action="store_true", help="engines without GPUs")
    parser.add_argument("--gpus-per-node", type=_positive, default=8, metavar="N")
    parser.add_argument("--drain-wait", type=_positive, default=600, metavar="S", help="for a pod's last requests")
    parser.add_argument("--cpu", default="8", help="requested for a server")
    parser.add_argument("--memory", default="32Gi", help="requested for a server; /dev/shm counts")
    parser.add_argument("--shm", default="8Gi", metavar="SIZE", help="of /dev/shm, through which requests and KV go")
    parser.add_argument("--storage", default="200Gi", metavar="SIZE", help="of the volume of models")
    parser.add_argument("--storage-class", default="", metavar="NAME")
    parser.add_argument("--gateway", default="", metavar="SERVICE", help="endpoint picker: an InferencePool, too")
    parser.add_argument("--api-keys", default="", metavar="FILE", help="keys that the frontend asks for")
    parser.add_argument("--allowed-host", action="append", default=[], metavar="HOST", help="by which clients call it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the recipe; may repeat")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}; 1 or more")
    return number


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
