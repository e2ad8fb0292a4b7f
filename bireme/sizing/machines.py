"""GPUs that recipes are made for: what one holds and does, and how many see each other by NVLink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GB = 10**9
Format = Literal["bf16", "fp8", "fp8_blocks", "nvfp4", "mxfp4"]  # of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Vendor's figures; rates are peaks, of dense products."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops: Mapping[str, float]  # by the products' type: bf16, fp8, fp4
    nvlink_bytes_per_s: float  # of one GPU, one way
    gpus_per_node: int
    nvlink_domain: int  # GPUs that reach each other by NVLink; more than a node: racks such as NVL72
    network_bytes_per_s: float  # of one GPU, one way, beyond the domain
    capability: tuple[int, int]  # compute capability, by NVIDIA's table of CUDA GPUs

    @property
    def is_blackwell(self) -> bool:
        return self.capability >= (10, 0)

    def flops_of(self, weights: Format) -> float:
        """Return the rate of products with weights of that format; what a GPU lacks is computed in BF16."""
        kind = {"fp8": "fp8", "fp8_blocks": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}.get(weights, "bf16")
        return self.flops.get(kind, self.flops["bf16"])


_HOPPER = {"bf16": 989e12, "fp8": 1979e12}
# Data sheets of H100 SXM, H200 SXM, HGX B200 and GB200 NVL72; memory as the driver tells it.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="h100", memory_bytes=85_520_809_984, memory_bytes_per_s=3350 * GB, flops=_HOPPER,
            nvlink_bytes_per_s=450 * GB, gpus_per_node=8, nvlink_domain=8, network_bytes_per_s=50 * GB,
            capability=(9, 0),
        ),
        Gpu(
            name="h200", memory_bytes=150_754_820_096, memory_bytes_per_s=4800 * GB, flops=_HOPPER,
            nvlink_bytes_per_s=450 * GB, gpus_per_node=8, nvlink_domain=8, network_bytes_per_s=50 * GB,
            capability=(9, 0),
        ),
        Gpu(
            name="b200", memory_bytes=191_000_000_000, memory_bytes_per_s=7700 * GB,
            flops={"bf16": 2250e12, "fp8": 4500e12, "fp4": 9000e12},
            nvlink_bytes_per_s=900 * GB, gpus_per_node=8, nvlink_domain=8, network_bytes_per_s=50 * GB,
            capability=(10, 0),
        ),
        Gpu(
            name="gb200", memory_bytes=198_000_000_000, memory_bytes_per_s=8000 * GB,
            flops={"bf16": 2500e12, "fp8": 5000e12, "fp4": 10000e12},
            nvlink_bytes_per_s=900 * GB, gpus_per_node=4, nvlink_domain=72, network_bytes_per_s=50 * GB,
            capability=(10, 0),
        ),
    )
}  # fmt: skip
