"""The chat model: not served by this version; it says so."""

from __future__ import annotations

from bireme.specs import CHAT
from bireme.stages.absent import UnservedStage


class Chat(UnservedStage):
    spec = CHAT
