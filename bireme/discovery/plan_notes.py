"""What a planner has decided lately, in a launch's run folder: its admin door writes it, the live view shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from bireme import private_files
from bireme.messages import MALFORMED

FILE_NAME = "plan_notes"
_MOST = 20  # that are kept
_Text = Annotated[str, msgspec.Meta(max_length=2000)]


class PlanNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    at: float  # Unix time, s
    result: Annotated[str, msgspec.Meta(max_length=20)]  # hold, same, up, down, both
    acts: bool  # False: it advises
    text: _Text  # sizes, what is wanted, and why


def add(folder: Path, note: PlanNote) -> None:
    """Raises OSError."""
    private_files.replace_file(folder / FILE_NAME, msgspec.json.encode([note, *read(folder)][:_MOST]))


def read(folder: Path) -> list[PlanNote]:
    """Return them, the newest first; []: there is no planner, or its notes can't be read."""
    try:
        with private_files.open_regular(folder / FILE_NAME) as file:
            return msgspec.json.decode(file.read(), type=list[PlanNote])
    except (OSError, *MALFORMED):
        return []
