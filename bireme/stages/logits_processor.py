"""The logits_processor model: not served by this version; it says so."""

from __future__ import annotations

from bireme.specs import LOGITS_PROCESSOR
from bireme.stages.absent import UnservedStage


class LogitsProcessor(UnservedStage):
    spec = LOGITS_PROCESSOR
