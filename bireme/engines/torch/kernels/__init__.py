"""Kernels in Triton's language, each beside a function in plain torch that computes the same.

Shapes: T tokens, R rows (one token each), H query heads, N key/value heads, K head size of keys, V of values. Pools
are (pool rows, N * K) and (pool rows, N * V). Importing these modules needs `triton`, which comes with torch's CUDA
builds.
"""

from __future__ import annotations

import importlib.util

import torch


def is_usable(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
