"""ensemble: tensorrt_llm_bls under the name that most of tensorrtllm_backend's clients call."""

from __future__ import annotations

from typing import ClassVar

from bireme.pipelines.tensorrt_llm_bls import TensorrtLlmBls
from bireme.specs import ENSEMBLE, ModelSpec


class Ensemble(TensorrtLlmBls):
    spec: ClassVar[ModelSpec] = ENSEMBLE
