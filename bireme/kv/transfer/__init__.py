"""KV transfer between engines: the interface (base.py), its implementations, the factory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bireme.errors import ConfigError
from bireme.kv.wire.curve import needs_curve

if TYPE_CHECKING:
    from bireme.config import CacheTransceiverConfig
    from bireme.kv.transfer.backend import Backend
    from bireme.kv.transfer.base import Find, KvTransfer
    from bireme.metrics import Registry


MAPPED = "MAPPED"  # within one host, of whatever kind the memory is that it is started with: for embeddings


def create_transfer(
    backend: str,
    *,
    run_dir: Path,
    worker: str,
    life: int,
    config: CacheTransceiverConfig,
    metrics: Registry,
    find: Find | None = None,
    host: str = "",
    deployment_key: bytes = b"",
) -> KvTransfer:
    """Make the transfer of one engine process; not started yet. Raises ConfigError.

    `find`: returns the record of the worker that disaggregated_params name, or raises NotFoundError; None: all are of
    this run folder. `host`: by what name or address other hosts reach this one, "" if none is to; those need
    `deployment_key`.
    """
    from bireme.kv.transfer.leased import LeasedTransfer

    mover: Backend
    if backend in ("DEFAULT", "SHM", "CUDA_IPC", MAPPED):
        from bireme.kv.transfer.mapped import MappedBackend
        from bireme.kv.transfer.memory import MemoryKind
        from bireme.kv.transfer.shm import ShmBackend

        kinds: dict[str, MemoryKind | None] = {"CUDA_IPC": MemoryKind.VRAM, MAPPED: None}
        mover, host = MappedBackend(kinds.get(backend, MemoryKind.DRAM), ShmBackend(run_dir, worker, life)), ""
    elif backend in ("NIXL", "UCX"):
        from bireme.kv.transfer.nixl import NixlBackend

        between_hosts = bool(host) and needs_curve(f"tcp://{host}:0")
        mover = NixlBackend(worker, between_hosts=between_hosts, staging=config.staging)
    else:
        raise ConfigError(
            f"cache_transceiver_config.backend: {backend} is not available on the embedded engines, which have DEFAULT"
            " and SHM (shared memory of one host), CUDA_IPC (GPUs of one host), NIXL and UCX (several hosts);"
            " engine: trtllm has it"
        )
    return LeasedTransfer(
        mover,
        run_dir=run_dir,
        worker=worker,
        life=life,
        config=config,
        metrics=metrics,
        find=find,
        host=host,
        deployment_key=deployment_key,
    )


def sweep(run_dir: Path, worker: str) -> int:
    """Remove the remains of a worker's dead engine processes, of every backend; return the number of files.

    Call it between lives. What TensorRT-LLM moves itself ends with its process.
    """
    from bireme.kv.transfer import shm_file

    return shm_file.sweep(run_dir, worker)
