"""What a launch opens to other hosts is asked for by name: Triton's ports know no keys, limits or tenants."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from bireme.config import Recipe
from bireme.errors import ConfigError
from bireme.launch.console import Console
from bireme.launch.ports import Hosts, is_every_address, is_loopback

_SOUND_TRITON = (2, 71)  # 26.07: holes of older ones are public


def check_openings(hosts: Hosts, recipe: Recipe, *, has_keys: bool, advertise: str = "", health_host: str = "") -> None:
    """Raise ConfigError where an opening contradicts the launch's keys or discovery.

    `has_keys`: the OpenAI port asks for keys, and Triton's were not said to need none.
    """
    has_tls = bool(recipe.grpc_tls.certificate)
    open_ports = [f"{name} ({host})" for name, host in hosts.opened.items() if not (name == "grpc" and has_tls)]
    if has_keys and open_ports:
        raise ConfigError(
            f"API keys guard the OpenAI port alone; Triton's {' and '.join(open_ports)} would answer other hosts"
            " without one: leave --triton-host and --grpc-host out, give gRPC certificates (grpc_tls in the recipe),"
            " or say --triton-without-keys"
        )
    if recipe.discovery.is_shared:
        _check_discovery(hosts, recipe, has_tls=has_tls, advertise=advertise)
    if recipe.discovery.backend == "kubernetes" and is_loopback(health_host) and not _has_own_store(recipe):
        raise ConfigError(
            f"--health-host {health_host}: other pods ask this port which workers are here; name the pod's address, by"
            " $(POD_IP) in its manifest"
        )


def _check_discovery(hosts: Hosts, recipe: Recipe, *, has_tls: bool, advertise: str) -> None:
    if is_every_address(hosts.grpc) and not has_tls:
        raise ConfigError(
            f"--grpc-host {hosts.grpc}: with discovery, who reaches gRPC uses every worker; name the network of the"
            " servers (--grpc-host 10.1.0.0/16, or an address of this machine), or set grpc_tls in the recipe"
        )
    if not advertise and is_loopback(hosts.grpc) and not _has_own_store(recipe):
        raise ConfigError(
            f"--grpc-host {hosts.grpc}: other hosts find this server in {recipe.discovery.backend} and can't reach"
            " its gRPC port; name the network of the servers (--grpc-host 10.1.0.0/16), or by which address they do"
            " reach it (--advertise)"
        )


def warn_of_old_triton(hosts: Hosts, version: str, console: Console) -> None:
    """`version`: 2.51.0."""
    is_old = tuple(map(int, re.findall(r"\d+", version)[:2])) < _SOUND_TRITON
    if is_old and (opened := hosts.opened):
        console.event(
            "old_triton_open", "warning", version=version, ports=",".join(opened),
            remedy="docker/Dockerfile.triton, or no --triton-host (docs/security.md, Holes of tritonserver)",
        )  # fmt: skip


def _has_own_store(recipe: Recipe) -> bool:
    """Whether all of a deployment is on this machine. Also true of a folder: its place is unknown."""
    if recipe.discovery.backend == "kubernetes":
        return is_loopback(os.environ.get("KUBERNETES_SERVICE_HOST", ""))
    endpoints = (urlsplit(endpoint).hostname or "" for endpoint in recipe.discovery.endpoints)
    return recipe.discovery.backend != "etcd" or any(map(is_loopback, endpoints))
