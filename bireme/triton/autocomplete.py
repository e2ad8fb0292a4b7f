"""A ModelSpec -> Triton's model configuration, so that config.pbtxt never spells a tensor."""

from __future__ import annotations

from typing import Any

from bireme.specs import ModelSpec, TensorSpec


def complete_config(config: Any, spec: ModelSpec) -> Any:
    """Add inputs, outputs and policy to a pb_utils.ModelConfig; a contradicting pbtxt fails the load."""
    config.set_max_batch_size(spec.max_batch_size)
    config.set_model_transaction_policy({"decoupled": spec.decoupled})
    for tensor in spec.inputs:
        config.add_input(tensor_config(tensor) | {"optional": tensor.optional})
    for tensor in spec.outputs:
        config.add_output(tensor_config(tensor))
    return config


def tensor_config(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": tensor.triton_type, "dims": list(tensor.dims)}
