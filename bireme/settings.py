"""What blocks of settings are written in: their base, ranges, and rules beside keys that not every engine honors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
SeqLen = Annotated[int, msgspec.Meta(ge=2)]  # a prompt of one token, and one that is generated
Duration = Annotated[float, msgspec.Meta(ge=0)]  # its unit is in the field's name
PositiveDuration = Annotated[float, msgspec.Meta(gt=0)]
Instances = Annotated[int, msgspec.Meta(ge=1, le=64)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every settings block."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What an engine does with a key of its YAML."""

    kind: Literal["honored", "harmless", "refused"]
    reason: str = ""  # of a refusal, with the remedy
    accepted: tuple[Any, ...] = ()  # values that a refused key may have all the same


class Engines:
    """Stands beside a key, or a block of keys, that not every engine honors; an engine it does not name does."""

    def __init__(self, **rules: Rule) -> None:
        self.rules = rules


HARMLESS = Rule("harmless")
# Whether NIXL moves KV through page-locked host memory: auto, where UCX can't move a GPU's without the host.
StagingChoice = Literal["auto", "always", "never"]
_TRTLLM_STAGES = Rule("refused", "TensorRT-LLM stages KV itself; remove it", ("auto",))
Staging = Annotated[StagingChoice, Engines(trtllm=_TRTLLM_STAGES)]
