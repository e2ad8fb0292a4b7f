"""Two hosts on this one: network namespaces that a cable joins, with process ids and /dev/shm of their own.

Needs root and iproute2; also in a network namespace of its own, as containers and `unshare -n` have.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

_CLONE_NEWNET = 0x40000000
_SHM_BYTES = 1 << 30
_T = TypeVar("_T")


def why_not() -> str:
    """Return why no hosts can be made here; "" where they can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if shutil.which("ip") is None:
        return "the program ip is missing (apt-get install iproute2)"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "probe", "type", "veth"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Cable:
    """Two hosts, and the cable between them."""

    def __init__(self) -> None:
        number = os.getpid()
        self.names = {"prefill": f"bp{number}", "decode": f"bd{number}"}
        self.addresses = {"prefill": "10.77.0.1", "decode": "10.77.0.2"}
        for name in self.names.values():
            ip("netns", "add", name)
        first, second = self.names.values()
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for worker, name in self.names.items():
            ip("-n", name, "addr", "add", f"{self.addresses[worker]}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")

    def command(self, worker: str) -> list[str]:
        """Return what runs a program on a host; it ends with the process that ran it."""
        shm = f'mount -t tmpfs -o size={_SHM_BYTES} tmpfs /dev/shm && exec "$@"'
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.names[worker], *unshare, "sh", "-c", shm, "sh"]

    def plug(self, is_in: bool) -> None:
        ip("-n", self.names["prefill"], "link", "set", "cable", "up" if is_in else "down")

    def slow_down(self, kbit_s: int) -> None:
        """Let prefill's host send so many kbit/s; 0: as many as it can."""
        base = ["tc", "-n", self.names["prefill"], "qdisc"]
        if kbit_s:
            limit = ["tbf", "rate", f"{kbit_s}kbit", "burst", "16kb", "latency", "500ms"]
            subprocess.run([*base, "replace", "dev", "cable", "root", *limit], check=True, capture_output=True)
        else:
            subprocess.run([*base, "del", "dev", "cable", "root"], check=False, capture_output=True)

    def on_host(self, worker: str, action: Callable[[], _T]) -> _T:
        """Return what `action` returns on a host: a thread's sockets belong to the network it was in."""
        done: list[Any] = []

        def run() -> None:
            with Path(f"/run/netns/{self.names[worker]}").open("rb") as namespace:
                assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) == 0
            try:
                done.append(action())
            except Exception as error:
                done.append(error)

        thread = threading.Thread(target=run, name=f"on-{worker}")
        thread.start()
        thread.join()
        if isinstance(done[0], Exception):
            raise done[0]
        found: _T = done[0]
        return found

    def remove(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)
