"""The multimodal_encoder model: not served by this version; it says so."""

from __future__ import annotations

from bireme.specs import MULTIMODAL_ENCODER
from bireme.stages.absent import UnservedStage


class MultimodalEncoder(UnservedStage):
    spec = MULTIMODAL_ENCODER
