"""A stand-in for trtllm-llmapi-launch: every task is a rank of a real MPI world, and rank 0 leads them.

As the real one's: beside rank 0 the command runs, split at blanks and without what launchers have told the ranks; its
LLM finds the leader by TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR; all others wait to be told what to do. As in the real one the
ranks stay when the command has failed: the leader is not told.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

from mpi4py import MPI

_OF_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "MPI_", "UCX_")
_PAUSE_S = 0.05
START, STOP = "start", "stop"


def main(words: list[str]) -> int:
    world = MPI.COMM_WORLD
    return lead(world, " ".join(words).split()) if world.rank == 0 else follow(world)


def lead(world: MPI.Comm, command: list[str]) -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(_PAUSE_S)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
        led = {
            "TLLM_SPAWN_PROXY_PROCESS": "1",
            "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR": f"tcp://127.0.0.1:{door.getsockname()[1]}",
        }
        running = subprocess.Popen(command, env=kept | led)
        while running.poll() != 0:
            with contextlib.suppress(TimeoutError):
                caller, _ = door.accept()
                with caller:
                    caller.sendall(json.dumps(start_all(world)).encode() + b"\n")
    tell_all(world, STOP)
    return 0


def start_all(world: MPI.Comm) -> list[str]:
    """Return the node of each rank, as it tells itself."""
    tell_all(world, START)
    return [node(), *(world.recv(source=rank) for rank in range(1, world.size))]


def tell_all(world: MPI.Comm, what: str) -> None:
    for rank in range(1, world.size):
        world.send(what, dest=rank)


def follow(world: MPI.Comm) -> int:
    while True:
        while not world.iprobe(source=0):  # receiving would keep a core busy
            time.sleep(_PAUSE_S)
        if world.recv(source=0) == STOP:
            return 0
        world.send(node(), dest=0)


def node() -> str:
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
