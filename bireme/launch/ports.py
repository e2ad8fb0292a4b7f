"""The ports of one tritonserver, free ones, and the hosts to listen on."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

from bireme.errors import ConfigError

LOOPBACK = "127.0.0.1"
# Below the kernel's ephemeral range (32768 and up), so that no outgoing connection takes one meanwhile.
_FIRST, _END = 25000, 32000
_BLOCK = 50


@dataclass(frozen=True, slots=True)
class Ports:
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(frozen=True, slots=True)
class Hosts:
    http: str = LOOPBACK
    grpc: str = LOOPBACK
    metrics: str = LOOPBACK

    @property
    def opened(self) -> dict[str, str]:
        """Return port -> host of those open to other hosts."""
        named = {"http": self.http, "grpc": self.grpc}
        return {name: host for name, host in named.items() if not is_loopback(host)}


class Listener(NamedTuple):
    host_option: str
    host: str
    port: int


def free_ports() -> Ports:
    """Raises OSError."""
    return Ports(free_port(), free_port(), free_port())


def free_port() -> int:
    """Return a port on which nobody listens; given once while this process lives. Raises OSError."""
    with _lock:
        while True:
            while _unused:
                if is_free(port := _unused.pop()):
                    return port
            _take_block()


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Raises OSError when it can't be bound for another reason than its use."""
    family, address = resolve(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return family and socket address; of a name IPv4 if it has one. Raises OSError."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:  # it can't be a name
        raise OSError(str(error)) from error
    family, _, _, _, (ip, _, *scope) = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (ip, port, *scope)


def is_loopback(host: str) -> bool:
    """False for a name that can't be resolved."""
    try:
        _, (ip, *_) = resolve(host, 0)
    except OSError:
        return False
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def is_every_address(host: str) -> bool:
    """Also in other spellings, such as 0."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:  # a name
        return False
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0]).is_unspecified


def host_in(host: str) -> str:
    """Return this machine's address in a network (10.1.0.0/16), or the host. Raises ConfigError."""
    if "/" not in host:
        return host
    try:
        network = ipaddress.ip_network(host)
    except ValueError as error:
        raise ConfigError(f"{host} is no network ({error}); write one like 10.1.0.0/16") from error
    with socket.socket(socket.AF_INET if network.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(network[1 if network.num_addresses > 1 else 0]), 9))  # sends nothing: asks for the route
            own = str(probe.getsockname()[0])
        except OSError:
            own = ""
    if not own or ipaddress.ip_address(own) not in network:
        raise ConfigError(f"this machine has no address in {host}; `ip address` lists what it has")
    return own


def own_host(host: str) -> str:
    """Return how this machine reaches what listens on `host`."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def listen_flags(hosts: Hosts) -> tuple[str, ...]:
    """Return tritonserver's flags. Raises OSError.

    Its HTTP server takes names for 255.255.255.255 and writes IPv6 in its own form.
    """
    http, grpc, metrics = _forms(hosts.http)[0], _forms(hosts.grpc)[1], _forms(hosts.metrics)[0]
    return f"--http-address={http}", f"--grpc-address={grpc}", f"--metrics-address={metrics}"


def _forms(host: str) -> tuple[str, str]:
    family, (ip, *_) = resolve(host, 0)
    return (f"ipv6:{ip}", f"[{ip}]") if family == socket.AF_INET6 else (ip, ip)


_lock = threading.Lock()
_unused: list[int] = []
# A block is taken by a socket's abstract name, which is known where the ports are (in one network namespace), to all
# users, and is free again when the process has ended, however it did.
_taken: list[socket.socket] = []
os.register_at_fork(after_in_child=_unused.clear)  # a fork takes blocks of its own


def _take_block() -> None:
    blocks = list(range(_FIRST, _END, _BLOCK))
    random.shuffle(blocks)
    for first in blocks:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0bireme-ports-{first}")
        except OSError:
            claim.close()
            continue
        _taken.append(claim)
        _unused.extend(range(first, first + _BLOCK))
        return
    raise OSError(f"no free ports: all of {_FIRST} to {_END - 1} were given to processes that still run")
