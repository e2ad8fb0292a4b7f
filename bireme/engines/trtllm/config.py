"""From a recipe's engine YAML to the keyword arguments of TensorRT-LLM's `LLM`.

Its one rule: nothing here imports tensorrt_llm or needs a GPU, so that a recipe can be checked anywhere.
"""

from __future__ import annotations

from typing import Any

from bireme.config import EngineConfig

FLOOR = "1.2.1"  # oldest and newest release that the contract describes
CEILING = "1.3.0rc29"


def llm_arguments(config: EngineConfig, model: str, stage: str, version: str = FLOOR) -> dict[str, Any]:
    """Return every keyword argument of `LLM`: the YAML's, with aliases resolved and bireme's own keys left out.

    What the YAML does not set is absent, so that TensorRT-LLM's (and the model's) defaults hold; `backend` is
    there when the YAML names one (`_autodeploy`). `stage` is prefill, decode or multimodal_encoder; `version` is
    tensorrt_llm.__version__. Raises ConfigError naming the key, its value and the remedy.
    """
    return {"model": model} | config.llm_args
