"""The video_diffusion model: not served by this version; it says so."""

from __future__ import annotations

from bireme.specs import VIDEO_DIFFUSION
from bireme.stages.absent import UnservedStage


class VideoDiffusion(UnservedStage):
    spec = VIDEO_DIFFUSION
