"""What Slurm and MPI put into the environment of all that they start, and what TensorRT-LLM makes of it."""

from __future__ import annotations

import logging
import re
from collections.abc import MutableMapping

logger = logging.getLogger("bireme.engine")
# With these VisualGen waits for ranks that something else starts.
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS")
# What they tell their tasks; a user's own settings (OMPI_ALLOW_RUN_AS_ROOT, OMPI_MCA_btl, PMIX_MCA_gds) are none of it.
_LAUNCHERS = re.compile(
    r"PMI_|PMIX_(?!MCA_)|PRTE_|SLURM_|OMPI_(COMM_WORLD|UNIVERSE|APP_CTX|NUM_APP_CTX|FIRST_RANKS|MCA_(orte|ess|pmix|prte))"
)
_OWN_LAUNCHER = "TLLM_SPAWN_PROXY_PROCESS"  # set by trtllm-llmapi-launch, whose ranks are there already


def drop_ranks(environment: MutableMapping[str, str]) -> None:
    """For VisualGen, which starts its own processes."""
    _drop(environment, [name for name in _RANKS if name in environment])


def drop_launchers(environment: MutableMapping[str, str]) -> None:
    """For an LLM, before tensorrt_llm is imported: it has MPI start its ranks, one GPU's too, and under srun or mpirun
    these would be asked for ranks that they have no place for.
    """
    if _OWN_LAUNCHER not in environment:
        _drop(environment, [name for name in environment if _LAUNCHERS.match(name)])


def _drop(environment: MutableMapping[str, str], names: list[str]) -> None:
    for name in names:
        del environment[name]
    if names:
        logger.info("variables_dropped names=%s reason=tensorrt_llm_starts_its_own_processes", ",".join(sorted(names)))
