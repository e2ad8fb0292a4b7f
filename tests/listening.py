"""What the processes of a launch listen on, as the kernel tells it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path

from bireme.launch import processes

_LISTENS, _UDP = "0A", "07"  # states in /proc/net


def tcp_listeners(pids: list[int]) -> dict[tuple[str, int], int]:
    """Return (address, port) -> pid. UDP sockets that wait for anybody count as well."""
    owners = _owners(pids)
    return {address: owners[inode] for address, inode in _internet_sockets() if inode in owners}


def unix_listeners(pids: list[int]) -> set[str]:
    """Return paths; names in the abstract namespace, which every local user reaches, begin with @."""
    owners, found = _owners(pids), set()
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = row.split()
        is_listening = int(fields[3], 16) & 0x10000
        if is_listening and fields[6] in owners and len(fields) > 7:
            found.add(fields[7])
    return found


def family(pid: int) -> list[int]:
    return [pid, *processes.descendants(pid)]


def _internet_sockets() -> Iterator[tuple[tuple[str, int], str]]:
    for table, state in (("tcp", _LISTENS), ("tcp6", _LISTENS), ("udp", _UDP), ("udp6", _UDP)):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == state:
                yield (_address(address), int(port, 16)), fields[9]


def _address(text: str) -> str:
    """Four bytes, or four times four, each in the machine's order."""
    words = [bytes.fromhex(word)[::-1] for word in re.findall("[0-9A-F]{8}", text)]
    address = ipaddress.ip_address(b"".join(words))
    return str((address.version == 6 and address.ipv4_mapped) or address)


def _owners(pids: list[int]) -> dict[str, int]:
    """Return inode -> pid of all sockets that the processes have open; the first process that is named has it."""
    found: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for link in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    if match := re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{link}")):
                        found.setdefault(match[1], pid)
    return found
