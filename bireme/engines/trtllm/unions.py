"""Settings whose class a key chooses: speculative_config by decoding_type, sparse_attention_config by algorithm.

The installed release decides. Up to 1.2 those keys are no fields of the classes, which refuse them, so a mapping must
be converted with `from_dict`; later releases take the mapping.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any

_UNIONS = {"speculative_config": "DecodingBaseConfig", "sparse_attention_config": "BaseSparseAttentionConfig"}


def choose_classes(values: Mapping[str, Any]) -> dict[str, Any]:
    """In the form that the installed TensorRT-LLM takes."""
    result = dict(values)
    classes = importlib.import_module("tensorrt_llm.llmapi.llm_args")
    for name, base in _UNIONS.items():
        from_dict = getattr(getattr(classes, base, None), "from_dict", None)
        if from_dict is not None and isinstance(result.get(name), Mapping):
            result[name] = from_dict(copy.deepcopy(result[name]))  # a copy: it removes the choosing key
    return result
