"""What this machine's CPU can do, as far as the torch engine decides by it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86: AVX-512, AMX; Arm: BF16
# oneDNN's names of instruction sets (ONEDNN_MAX_CPU_ISA, DNNL_MAX_CPU_ISA) that have no products of bfloat16.
_WITHOUT_BFLOAT16 = frozenset(
    "SSE41 AVX AVX2 AVX2_VNNI AVX2_VNNI_2 AVX512_MIC AVX512_MIC_4OPS AVX512_CORE AVX512_CORE_VNNI".split()
)


def flags() -> frozenset[str]:
    """Return /proc/cpuinfo's names of instruction sets; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return frozenset(found.partition(":")[2].split())


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN has instructions for products of bfloat16 here; else float32 is faster."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return bool(flags() & _BFLOAT16) and most.upper() not in _WITHOUT_BFLOAT16
