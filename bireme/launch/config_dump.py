"""`serve.py --dump-config-to FILE`: everything that is effective in a launch in one file, without its secrets.

Written when the launch begins and again when it is ready, each time as a whole and with mode 0600.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from bireme import yaml_text
from bireme.config import Recipe
from bireme.discovery import run_folder
from bireme.engines.stub.environment import devices_of, num_threads
from bireme.errors import BiremeError, ConfigError
from bireme.launch import machine
from bireme.launch.deployment import Deployment
from bireme.launch.secret_values import MERGED, leave_out, shown_variables
from bireme.launch.tritonserver import address
from bireme.launch.value_sources import Layer, sources_of, tree_of
from bireme.launch.yaml_source import Keys

OPTION = "--dump-config-to"
FORM = "bireme.config.v1"
# Keys that hold the name of a file with secrets: shown where there is such a file.
_FILES: tuple[Keys, ...] = (
    ("frontend", "api_keys"),
    ("kv_events", "nats_credentials"),
    ("grpc_tls", "key"),
    ("discovery", "cert_key"),
)
_FILE_OPTIONS = ("api_keys", "tls_key", "admin_key_file", "admin_tls_key")  # the same
State = Literal["starting", "ready"]


class ConfigFile:
    """A file that is replaced as a whole."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for one that can't be written."""
        self._path = Path(path)
        if self._path.suffix not in (".json", ".yaml", ".yml"):
            raise ConfigError(f"{OPTION} {path}: JSON or YAML? End the name in .json, .yaml or .yml")
        if self._path.exists() and not self._path.is_file():
            raise ConfigError(f"{OPTION} {path}: it is there and no regular file; give another name")
        try:
            self._draft(b"").unlink()
        except OSError as error:
            raise ConfigError(
                f"{OPTION} {path}: can't be written: {error.strerror or error}; give a file in a folder that is there"
                " and that this user may write"
            ) from error

    def write(self, document: Mapping[str, Any]) -> None:
        """Raises OSError, and the file is as before."""
        if self._path.suffix == ".json":
            text = json.dumps(document, indent=2)
        else:
            text = yaml_text.write(document)
        draft = self._draft(f"{text}\n".encode())
        try:
            draft.replace(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _draft(self, content: bytes) -> Path:
        """mkstemp's mode is 0600."""
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        return Path(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the command line and the environment said."""

    options: Mapping[str, Any]  # name -> {value, source}
    layers: Sequence[Layer] = ()  # over the recipe
    base: str = ""  # what made the recipe, if it is no folder of the user's
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def describe(deployment: Deployment, given: Given, state: State) -> dict[str, Any]:
    """Return all that is known of a launch so far."""
    settings, recipe = deployment.settings, deployment.settings.recipe
    tree = tree_of(recipe)
    sources = sources_of(tree, Path(recipe.folder), given.layers, given.base)
    shown = leave_out(tree, _named_files(recipe))
    options, variables = leave_out(given.options, _option_files(given.options)), shown_variables(given.environment)
    document: dict[str, Any] = {
        "form": FORM,
        "state": state,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": machine.versions(recipe, given.environment) | _tritonserver(deployment, state),
        "machine": machine.describe(given.environment),
        "ports": _ports(deployment),
        "options": options,
        "environment": variables,
        "recipe_folder": recipe.folder,
        "recipe": shown,
        "sources": sources,
        "left_out": [
            *(key for key in sources if not _has(shown, key)),
            *(f"--{name.replace('_', '-')}" for name, option in options.items() if "value" not in option),
            *sorted(
                name for name in given.environment.keys() - variables.keys() - {MERGED} if name.startswith("BIREME_")
            ),
        ],
        "settled": leave_out(_settled(recipe)),
        "workers": _workers(deployment, state),
    }
    if settings.triton_arguments:
        document["triton_arguments"] = [_flag(argument) for argument in settings.triton_arguments]
    return document


def _named_files(recipe: Recipe) -> frozenset[Keys]:
    def value(keys: Keys) -> str:
        block, name = keys
        return str(getattr(getattr(recipe, block), name))

    return frozenset(
        keys for keys in _FILES if Path(recipe.folder, Path(os.path.expandvars(value(keys))).expanduser()).is_file()
    )


def _option_files(options: Mapping[str, Any]) -> frozenset[Keys]:
    named = {name: options.get(name, {}).get("value") for name in _FILE_OPTIONS}
    return frozenset((name, "value") for name, path in named.items() if path and Path(path).is_file())


def _has(tree: Mapping[str, Any], key: str) -> bool:
    """Return whether a dotted key is there; names may have dots themselves."""
    if key in tree:
        return True
    return any(
        isinstance(value, Mapping) and _has(value, key[len(name) + 1 :])
        for name, value in tree.items()
        if key.startswith(f"{name}.")
    )


def _flag(argument: str) -> str:
    """Without its value, which may be a key."""
    return argument.partition("=")[0] if argument.startswith("--") else "(left out)"


def _tritonserver(deployment: Deployment, state: State) -> dict[str, str]:
    if state == "ready":
        with contextlib.suppress(BiremeError, OSError):
            return {"tritonserver": deployment.server.version()}
    return {}


def _ports(deployment: Deployment) -> dict[str, str]:
    settings = deployment.settings
    hosts, ports = settings.hosts, settings.ports
    found = {
        "http": address(hosts.http, ports.http),
        "grpc": address(hosts.grpc, ports.grpc),
        "metrics": address(hosts.metrics, ports.metrics),
        "health": address(settings.health_host, settings.health_port),
    }
    if (frontend := settings.frontend) is not None:
        found["openai"] = address(frontend.host, frontend.port)
    if (admin := settings.admin) is not None:
        found["admin"] = address(admin.host, admin.port)
    if settings.advertise:
        found["advertised_grpc"] = settings.advertise
    return found


def _settled(recipe: Recipe) -> dict[str, Any]:
    """What follows from the recipe's values where they leave it open."""
    return {
        "served_model_name": recipe.served_name,
        "model": recipe.model_path,
        "tokenizer": recipe.tokenizer_path,
        "routing_mode": recipe.routing_mode,
        "publishes_kv_events": recipe.publishes_events,
        "workers": {
            worker: {
                "engine": entry.engine,
                "model": recipe.worker_model_path(stage),
                "num_threads": num_threads(recipe, entry),
                "devices": list(devices_of(entry, worker)) if entry.devices else "all",
            }
            for stage, entry in recipe.workers.items()
            for worker in recipe.replicas(stage)
        },
    }


def _workers(deployment: Deployment, state: State) -> dict[str, Any]:
    """What the engines say of themselves once they have loaded; a video engine says nothing here."""
    found: dict[str, Any] = {}
    recipe = deployment.settings.recipe
    for worker in (worker for stage in recipe.workers for worker in recipe.replicas(stage) if state == "ready"):
        with contextlib.suppress(BiremeError):
            record = run_folder.find(deployment.run_folder.path, worker)
            found[worker] = {"life": record.life, "pid": record.pid}
            if record.capacity is not None:
                found[worker] |= msgspec.to_builtins(record.capacity)
    return found
