"""generate: text or ids in, deltas out; one response with everything unless `stream` is true."""

from __future__ import annotations

from typing import ClassVar

from bireme.pipelines.text import TextPipeline
from bireme.specs import GENERATE, ModelSpec


class Generate(TextPipeline):
    spec: ClassVar[ModelSpec] = GENERATE
