"""completion: the same as generate, unary: for tritonclient's infer, /infer and unary perf_analyzer."""

from __future__ import annotations

from typing import ClassVar

from bireme.pipelines.text import TextPipeline
from bireme.specs import COMPLETION, ModelSpec


class Completion(TextPipeline):
    spec: ClassVar[ModelSpec] = COMPLETION
