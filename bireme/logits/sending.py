"""From the host to the logits' device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def send(array: Any, device: torch.device) -> torch.Tensor:
    # By a copy that waits for nothing: a step may be running there.
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def outgoing(shape: tuple[int, ...], dtype: str, device: torch.device | str) -> torch.Tensor:
    """Return host memory that is to be filled and copied there."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=torch.device(device).type == "cuda")
