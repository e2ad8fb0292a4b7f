"""The logits processor protocol: Dynamo's `BaseLogitsProcessor`, plus a context at creation.

A factory `factory(context, **arguments)` makes one for each sequence. It may keep state, and is called once a step:

    processor(token_ids, logits)    # token_ids: prompt and generated tokens so far, do not change it
                                    # logits: float32 tensor (vocab,), to be changed in place

What it raises ends that request alone, with INTERNAL. After a migration it is made again, with the resumed tokens.

`reads_token_ids = False` on a factory: an engine that begins a step before it knows the last token can run its
processors (TensorRT-LLM's overlap scheduler).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bireme.errors import BiremeError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    request_id: str
    vocab_size: int
    num_prompt_tokens: int
    eos_ids: tuple[int, ...] = ()


class BaseLogitsProcessor(Protocol):
    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None: ...


def call(processor: BaseLogitsProcessor, token_ids: Sequence[int], logits: torch.Tensor) -> None:
    """Raises BiremeError for what it raised."""
    try:
        processor(token_ids, logits)
    except Exception as error:  # user code may raise anything; only this request ends
        name = type(processor).__name__
        raise BiremeError(f"logits processor {name}: {type(error).__name__}: {error}") from error


# factory(context, **arguments): makes a processor; raises RequestError or ValueError for wrong arguments
ProcessorFactory = Callable[..., BaseLogitsProcessor]
