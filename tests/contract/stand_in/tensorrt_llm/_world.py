"""Ranks that trtllm-llmapi-launch has started: the LLM has their leader, below the same launcher, start them."""

from __future__ import annotations

import json
import os
import socket
import sys

_LED = "TLLM_SPAWN_PROXY_PROCESS"
_ADDRESS = "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"
_LIMIT_S = 60


def join(num_ranks: int) -> None:
    """Raises RuntimeError where the world is not of so many. Without the launcher the ranks are this process's own."""
    if os.environ.get(_LED) != "1":
        return
    host, port = os.environ[_ADDRESS].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), _LIMIT_S) as leader, leader.makefile() as answer:
        nodes = json.loads(answer.readline())
    if len(nodes) != num_ranks:
        raise RuntimeError(f"the world has {len(nodes)} ranks ({', '.join(nodes)}); {num_ranks} are needed")
    print(f"[TRT-LLM] [I] {num_ranks} ranks on {', '.join(nodes)}", file=sys.stderr, flush=True)
