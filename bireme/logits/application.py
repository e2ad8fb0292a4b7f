"""The sampler's processors on logits of another origin: what the logits_processor model computes.

Each row of each job gets new ones, which know only the row's history.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from bireme.errors import ConfigError
from bireme.logits.base import ProcessorContext, call
from bireme.logits.registry import create
from bireme.messages import ProcessorCall

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


class LogitsJob(msgspec.Struct, frozen=True, kw_only=True):
    """A checked call of the model. Arrays travel as bytes."""

    processors: tuple[ProcessorCall, ...]
    logits: bytes  # float32 (rows, vocab_size)
    vocab_size: int
    histories: tuple[bytes, ...]  # int32, one a row: prompt and generated tokens
    num_prompt_tokens: tuple[int, ...]  # one a row: how many of its history are the prompt
    eos_ids: tuple[int, ...] = ()
    request_id: str = ""

    @property
    def num_rows(self) -> int:
        return len(self.histories)


def warm_up() -> None:
    """Import torch. Raises ConfigError without it."""
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"logits processors need torch, which can't be imported: {error}") from error
    torch.set_grad_enabled(False)


def apply(job: LogitsJob) -> Logits:
    """Return new logits (rows, vocab_size). Raises RequestError naming a processor, or INTERNAL for what one raised."""
    import torch

    logits_RV = np.frombuffer(job.logits, np.float32).reshape(job.num_rows, job.vocab_size).copy()
    rows = torch.from_numpy(logits_RV)
    for at, history in enumerate(job.histories):
        context = ProcessorContext(job.request_id, job.vocab_size, job.num_prompt_tokens[at], job.eos_ids)
        token_ids = np.frombuffer(history, np.int32).tolist()
        for processor in create(job.processors, context):
            call(processor, token_ids, rows[at])
    return logits_RV
