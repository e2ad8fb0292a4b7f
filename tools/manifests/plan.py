"""Which pods a recipe becomes, and what is wrong with that: no cluster is asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bireme.config import Recipe, WorkerEntry
from bireme.engines.trtllm.config import prepared
from bireme.engines.trtllm.engine_yaml import Yaml
from bireme.errors import ConfigError
from bireme.launch.recipe_check import check_folder

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # what is appended fits a label's 63 characters
_MAX_CONFIG_BYTES = 1 << 20  # of a ConfigMap
HUB, IMAGE, VOLUME = "hub", "image", "volume"  # where the model comes from
MODELS = "/models"  # the volume of models in pods
KEYS = "/etc/bireme/keys"  # the volume of keys
_WHOLE, _FRONTEND = "server", "frontend"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    recipe: str
    image: str
    name: str
    namespace: str
    apart: bool
    discovery: str
    replicas: int
    frontends: int
    on_cpu: bool
    gpus_per_node: int
    drain_wait_s: int
    cpu: str
    memory: str
    shm: str
    storage: str
    storage_class: str
    picker: str  # Service of the gateway's endpoint picker; "": no gateway
    api_keys: str
    hosts: tuple[str, ...]
    settings: tuple[str, ...]

    @property
    def service(self) -> str:
        """The Service whose EndpointSlices tell which pods have workers; "": nobody reads them."""
        return f"{self.name}-workers" if self.discovery == f"kubernetes://{self.name}-workers" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSet:
    """Equal pods."""

    role: str  # server, prefill, decode or frontend
    replicas: int
    num_gpus: int = 0  # of each
    num_nodes: int = 1  # more: an engine over so many, each with a pod
    settings: tuple[str, ...] = ()  # --set over the recipe

    @property
    def is_frontend(self) -> bool:
        return self.role == _FRONTEND

    @property
    def spans_nodes(self) -> bool:
        return self.num_nodes > 1

    @property
    def has_openai(self) -> bool:
        return self.role in (_WHOLE, _FRONTEND)


def plan(recipe: Recipe, options: Options) -> list[PodSet]:
    """Return the sets of pods. Raises ConfigError with the remedy."""
    if not _NAME.fullmatch(options.name):
        raise ConfigError(f"--name {options.name}: small letters, digits and -, at most 40, a letter first")
    if found := [finding for finding in check_folder(Path(recipe.folder)) if finding.severity == "error"]:
        raise ConfigError("\n".join(map(str, found)))
    if not recipe.workers:
        raise ConfigError(f"{recipe.name} has no workers")
    gpus = {stage: _gpus_of(stage, entry, options) for stage, entry in recipe.workers.items()}
    _check_discovery(options)
    for stage, count in gpus.items():
        if count > options.gpus_per_node and count % options.gpus_per_node:
            raise ConfigError(
                f"workers.{stage}: an engine takes {count} GPUs, which don't fill nodes of {options.gpus_per_node};"
                " give --gpus-per-node"
            )
    return _apart(recipe, options, gpus) if options.apart else _whole(recipe, options, gpus)


def _check_discovery(options: Options) -> None:
    if options.discovery.startswith("kubernetes"):
        if not options.service:
            raise ConfigError(
                f"--discovery {options.discovery}: write kubernetes; the Service {options.name}-workers is made for it"
            )
        if not options.namespace:
            raise ConfigError(
                "--namespace: missing; the pods' right to read EndpointSlices is given to a service account by its"
                " namespace, name the one that they will run in"
            )


def _gpus_of(stage: str, entry: WorkerEntry, options: Options) -> int:
    """Return those of one engine."""
    if options.on_cpu or not entry.kind.needs_model:
        return 0
    if not entry.kind.has_llm_args:
        return 1
    yaml = Yaml(prepared(entry.engine_config.llm_args), stage, entry.engine_version or "1.2", is_disaggregated=False)
    return yaml.world_size


def _whole(recipe: Recipe, options: Options, gpus: dict[str, int]) -> list[PodSet]:
    """Each pod serves the whole recipe."""
    named = {device for entry in recipe.workers.values() for device in entry.devices}
    if named and all(entry.devices for entry in recipe.workers.values()):
        count = 0 if options.on_cpu else max(named) + 1
    else:
        count = sum(gpus[stage] * entry.replicas for stage, entry in recipe.workers.items())
    if (
        count == max(gpus.values()) > options.gpus_per_node
        and sum(entry.replicas for entry in recipe.workers.values()) == 1
    ):
        return [_set_of(_WHOLE, options.replicas, count, options)]
    if count > options.gpus_per_node:
        raise ConfigError(
            f"{recipe.name}: its workers take {count} GPUs together, a node has {options.gpus_per_node}"
            " (--gpus-per-node); lower their replicas, or give prefill and decode pods of their own (--apart)"
        )
    return [PodSet(role=_WHOLE, replicas=options.replicas, num_gpus=count)]


def _apart(recipe: Recipe, options: Options, gpus: dict[str, int]) -> list[PodSet]:
    """Prefill, decode and frontends are scaled apart; they find each other by discovery."""
    stages = [stage for stage in ("prefill", "decode", "multimodal_encoder") if stage in recipe.workers]
    if unknown := recipe.workers.keys() - set(stages):
        raise ConfigError(f"--apart: {', '.join(sorted(unknown))} can't have pods of its own; leave --apart out")
    if not options.discovery.startswith(("etcd://", "kubernetes://")):
        raise ConfigError(f"--discovery {options.discovery}: pods find each other by kubernetes or etcd://host:2379")
    for stage in stages if "prefill" in stages else ():
        entry = recipe.workers[stage]
        backend = entry.engine_config.cache_transceiver_config.backend
        if not entry.kind.moves_own_kv and backend != "NIXL":
            raise ConfigError(
                f"workers.{stage}: cache_transceiver_config.backend is {backend or '(none)'}; its KV stays within one"
                " pod, set NIXL"
            )
    sets = []
    for stage in stages:
        others = (f"workers.{other}.replicas=0" for other in stages if other != stage)
        settings = (f"workers.{stage}.replicas=1", *others)
        replicas = recipe.workers[stage].replicas * options.replicas
        sets.append(_set_of(_label(stage), replicas, gpus[stage], options, settings))
    return [*sets, PodSet(role=_FRONTEND, replicas=options.frontends)]


def _set_of(role: str, replicas: int, gpus: int, options: Options, settings: tuple[str, ...] = ()) -> PodSet:
    """`gpus`: of an engine, or of all that a pod has."""
    if gpus <= options.gpus_per_node:
        return PodSet(role=role, replicas=replicas, num_gpus=gpus, settings=settings)
    # A rank that has died takes its MPI world along: the group is made again, not the engine.
    settings = (*settings, "supervisor.max_restarts=0")
    nodes = gpus // options.gpus_per_node
    return PodSet(role=role, replicas=replicas, num_gpus=options.gpus_per_node, num_nodes=nodes, settings=settings)


def _label(stage: str) -> str:
    return stage.replace("multimodal_", "").replace("_", "-")


def model_source(recipe: Recipe, checkout: Path) -> str:
    """Return where pods have the model from. Raises ConfigError for a place that no pod has."""
    model = Path(recipe.model)
    if model.is_absolute():
        if not model.is_relative_to(MODELS):
            raise ConfigError(
                f"model: {recipe.model} is a folder of this machine; put it on the volume of models and name it"
                f" {MODELS}/..., or name a hub id"
            )
        return VOLUME
    return IMAGE if (checkout / model).is_dir() or recipe.model.startswith("models/") else HUB


def config_files(folder: Path) -> dict[str, str]:
    """Return the recipe's files for a ConfigMap. Raises ConfigError."""
    found: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            try:
                found[path.name] = path.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: it can't be put into a ConfigMap ({error})") from error
    if (size := sum(map(len, found.values()))) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{folder}: {size} bytes; a ConfigMap holds {_MAX_CONFIG_BYTES}")
    return found


def unlike_settings(settings: Sequence[str]) -> None:
    """Raises ConfigError for what is no KEY=VALUE."""
    for setting in settings:
        if "=" not in setting:
            raise ConfigError(f"--set {setting}: write KEY=VALUE")
