"""The video model: not served by this version; it says so."""

from __future__ import annotations

from bireme.specs import VIDEO
from bireme.stages.absent import UnservedStage


class Video(UnservedStage):
    spec = VIDEO
