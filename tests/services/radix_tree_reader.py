"""Run with the python of ai-dynamo's environment: its RadixTree reads a recorded stream of vLLM's KV events.

    python radix_tree_reader.py STREAM         STREAM: msgpack of a list of steps, see test_index_equality.py

Prints a JSON list: for each question {worker: blocks}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from dynamo._core import RadixTree, compute_block_hash_for_seq


def main() -> None:
    tree = RadixTree()
    answers = []
    for number, (kind, worker, value, lora_name) in enumerate(msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes())):
        if kind == "batch":
            for event in msgspec.msgpack.decode(value)[1]:
                if is_of_host(event):
                    continue
                tree.apply_event(
                    worker, json.dumps({"event_id": number, "data": data_of(event), "dp_rank": 0}).encode()
                )
        elif kind == "lost":
            tree.remove_worker(worker)
        else:
            size, tokens, infos = value
            hashes = compute_block_hash_for_seq(tokens, size, infos, lora_name or None)
            answers.append({str(key[0]): depth for key, depth in tree.find_matches(hashes).scores.items()})
    print(json.dumps(answers))


def data_of(event: list[Any]) -> Any:
    kind, *fields = event
    if kind == "BlockStored":
        hashes, parent, tokens, size = fields[:4]
        lora_name = fields[6] if len(fields) > 6 else None
        infos = [pictures_of(keys) for keys in fields[7]] if len(fields) > 7 and fields[7] else None
        local = compute_block_hash_for_seq(tokens, size, infos, lora_name)
        blocks = [{"block_hash": one, "tokens_hash": other} for one, other in zip(hashes, local, strict=True)]
        return {"stored": {"parent_hash": parent, "blocks": blocks}}
    if kind == "BlockRemoved":
        return {"removed": {"block_hashes": fields[0]}}
    return "cleared"


def is_of_host(event: list[Any]) -> bool:
    """Whether an event is of another tier than the device."""
    media = {"BlockStored": event[6:7], "BlockRemoved": event[2:3]}.get(event[0], [])
    return media not in ([], [None], ["GPU"])


def pictures_of(keys: list[str] | None) -> Any:
    return {"mm_objects": [{"mm_hash": int(key[:16], 16), "offsets": []} for key in keys]} if keys else None


if __name__ == "__main__":
    main()
