"""Triton's configuration of a Python model, written out whole.

What a config.pbtxt leaves out, Triton asks a stub for that it starts before the real one: a second a model.
"""

from __future__ import annotations

import re
from pathlib import Path

from bireme.specs import ModelSpec, TensorSpec

_ASKED = ("input", "output", "max_batch_size", "model_transaction_policy")
_KEY = re.compile(rf"^\s*({'|'.join(_ASKED)})\b", re.MULTILINE)
_COUNT = re.compile(r"^(\s*instance_group\s*\[\s*\{[^}]*\bcount\s*:\s*)\d+", re.MULTILINE)
_ENSEMBLE = re.compile(r'^\s*platform\s*:\s*"ensemble"', re.MULTILINE)


def whole_config(text: str, spec: ModelSpec, num_instances: int = 1) -> str:
    """Return `text` with the contents of `spec` that it lacks. `num_instances` above 1 replaces its count."""
    if num_instances > 1:
        text = _COUNT.sub(rf"\g<1>{num_instances}", text)
    if _KEY.search(text):
        return text
    inputs = [f"input {_tensor(tensor)}" for tensor in spec.inputs]
    outputs = [f"output {_tensor(tensor)}" for tensor in spec.outputs]
    decoupled = str(spec.decoupled).lower()
    policy = [f"max_batch_size: {spec.max_batch_size}", f"model_transaction_policy {{ decoupled: {decoupled} }}"]
    return "\n".join([text.rstrip("\n"), *policy, *inputs, *outputs, ""])


def are_whole(repository: Path) -> bool:
    """Whether Triton need not ask any of the models."""
    return all(_is_whole(path.read_text()) for path in repository.glob("*/config.pbtxt"))


def _is_whole(text: str) -> bool:
    return bool(_ENSEMBLE.search(text)) or set(_KEY.findall(text)) == set(_ASKED)


def _tensor(tensor: TensorSpec) -> str:
    dims = ", ".join(map(str, tensor.dims))
    optional = " optional: true" if tensor.optional else ""
    return f'{{ name: "{tensor.name}" data_type: {tensor.triton_type} dims: [ {dims} ]{optional} }}'
