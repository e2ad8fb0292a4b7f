"""Pictures' embeddings from one process to another: through pools that each maps of the other, and through files.

    python tests/gpu/embedding_pool.py                      # a GPU, or two where there are; JSON on stdout
    python tests/gpu/embedding_pool.py --device cpu --count 4 --tokens 300 --hidden 64

Each picture is compared bit by bit with what was made. Ends with 1 when one differs, when the pools were not mapped, or
when rows of a pool stay taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bireme.config import CacheTransceiverConfig
from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord, host_id
from bireme.engines.torch.images.embedding_pool import EmbeddingPool
from bireme.engines.torch.images.tensor_rows import TensorRows, layout_of
from bireme.kv.transfer import MAPPED, create_transfer
from bireme.metrics import Registry
from bireme.multimodal.embedding_share import EmbeddingShare
from bireme.multimodal.wire import EmbeddingHandle

DTYPE = torch.bfloat16
TIMEOUT_S = 60


class MappedSeen(logging.Handler):
    """Counts the lines that say that another process's memory was mapped."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "event=mapped" in record.getMessage()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    devices = devices_of(options.device)
    found: dict[str, Any] = {
        "devices": [str(device) for device in devices],
        "picture_bytes": options.tokens * options.hidden * DTYPE.itemsize,
    }
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    encoder = multiprocessing.get_context("spawn").Process(target=encode, args=(theirs, options, devices[0]))
    encoder.start()
    theirs.close()  # so that its end is seen here
    try:
        for way, pool_bytes in (("pool", options.pool_bytes), ("files", 0)):
            found[way] = measure(ours, options, devices[1], pool_bytes)
    finally:
        ours.close()
        encoder.join(TIMEOUT_S)
    found["is_good"] = all(found[way]["is_equal"] and found[way]["is_freed"] for way in ("pool", "files"))
    found["is_good"] &= found["pool"]["num_mapped"] == 1 and not found["files"]["num_mapped"]
    print(json.dumps(found))
    return 0 if found["is_good"] else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Moves embeddings between two processes, by pools and by files.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--count", type=int, default=64, help="pictures, one after the other")
    parser.add_argument("--tokens", type=int, default=2880)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--pool-bytes", type=int, default=256 << 20)
    return parser.parse_args(arguments)


def devices_of(kind: str) -> tuple[torch.device, torch.device]:
    """Return the encoder's and the reader's: two GPUs where there are."""
    if kind == "cpu":
        return torch.device("cpu"), torch.device("cpu")
    return torch.device("cuda", 0), torch.device("cuda", 1 if torch.cuda.device_count() > 1 else 0)


def picture(number: int, options: argparse.Namespace, device: torch.device) -> torch.Tensor:
    made = torch.Generator().manual_seed(number)
    return torch.randn(options.tokens, options.hidden, generator=made).to(DTYPE).to(device)


def measure(encoder: Any, options: argparse.Namespace, device: torch.device, pool_bytes: int) -> dict[str, Any]:
    """Let the other process make the pictures, fetch each here, and say how long the median one took."""
    seen = MappedSeen()
    log = logging.getLogger("bireme.kv.transfer")
    log.setLevel(logging.INFO)
    log.addHandler(seen)
    with tempfile.TemporaryDirectory() as folder:
        encoder.send((Path(folder), pool_bytes))
        share, pool = make_share(Path(folder), "reader", options, device, pool_bytes)
        try:
            seconds, is_equal = [], True
            for number in range(options.count):
                took_s, rows = fetch_one(encoder, number, share)
                seconds.append(took_s)
                expected = picture(number, options, torch.device("cpu"))
                is_equal &= torch.equal(rows.cpu(), expected)
            encoder.send(None)
            is_freed = bool(encoder.recv()) and (pool is None or pool.num_free == pool_bytes // row_bytes(options))
        finally:
            share.close()
            log.removeHandler(seen)
        encoder.send(None)
        encoder.recv()
    median = sorted(seconds)[len(seconds) // 2]
    return {"is_equal": is_equal, "is_freed": is_freed, "num_mapped": seen.count, "median_ms": round(median * 1e3, 3)}


def fetch_one(encoder: Any, number: int, share: EmbeddingShare) -> tuple[float, torch.Tensor]:
    encoder.send(number)
    handle: EmbeddingHandle = encoder.recv()
    has_come, results = threading.Event(), []
    began = time.monotonic()
    share.fetch(handle, lambda result: (results.append(result), has_come.set()))
    if not has_come.wait(TIMEOUT_S) or isinstance(results[0], Exception):
        raise RuntimeError(f"picture {number} did not come: {results}")
    took_s, (found,) = time.monotonic() - began, results
    if isinstance(found, TensorRows):
        return took_s, found.tensor
    return took_s, torch.frombuffer(found, dtype=DTYPE).view(handle.num_tokens, -1)


def encode(commands: Any, options: argparse.Namespace, device: torch.device) -> None:
    """The other process: for each folder and size of a pool, pictures until None; until nobody asks any more."""
    with contextlib.suppress(EOFError):
        while True:
            encode_one_way(commands, *commands.recv(), options, device)


def encode_one_way(
    commands: Any, folder: Path, pool_bytes: int, options: argparse.Namespace, device: torch.device
) -> None:
    """A picture for each number that it is told, until None; the share stays until the reader has closed its own."""
    share, pool = make_share(folder, "encoder", options, device, pool_bytes)
    while (number := commands.recv()) is not None:
        rows = TensorRows(picture(number, options, device))
        commands.send(share.offer(number, rows, f"{number:064x}", None))
    deadline = time.monotonic() + TIMEOUT_S
    while pool is not None and pool.num_free < pool_bytes // row_bytes(options) and time.monotonic() < deadline:
        time.sleep(0.01)
    commands.send(pool is None or pool.num_free == pool_bytes // row_bytes(options))
    commands.recv()  # the reader has closed its own
    share.close()
    commands.send(None)


def row_bytes(options: argparse.Namespace) -> int:
    return int(options.hidden * DTYPE.itemsize)


def make_share(
    folder: Path, worker: str, options: argparse.Namespace, device: torch.device, pool_bytes: int
) -> tuple[EmbeddingShare, EmbeddingPool | None]:
    transfer = create_transfer(
        MAPPED, run_dir=folder, worker=worker, life=1, config=CacheTransceiverConfig(), metrics=Registry(worker)
    )
    pool = EmbeddingPool(pool_bytes, DTYPE, options.hidden, device) if pool_bytes else None
    share = EmbeddingShare(transfer, worker, 1)
    share.start(layout_of("model", DTYPE, options.hidden), pool)
    address = {"pid": os.getpid(), "host": host_id(), "transfer_endpoint": share.endpoint}
    run_folder.publish(folder, WorkerRecord(worker=worker, life=1, **address))
    return share, pool


if __name__ == "__main__":
    sys.exit(main())
