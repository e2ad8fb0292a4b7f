"""The interface of what proposes tokens; the step that verifies them decides, so a drafter may be wrong at no risk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from bireme.engines.torch.step import Draft, Sequence


class Drafter(Protocol):
    """Used by the engine's thread, between steps."""

    num_kinds: int  # of evidence that a draft may rest on

    def propose(self, most: Mapping[Sequence, int]) -> dict[Sequence, Draft]:
        """Return drafts of at most so many tokens, at least one, for those sequences that it has any for."""
