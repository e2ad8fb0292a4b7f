"""Which dtype the weights get. Needs no torch: a program that starts engines says with it what they will take."""

from __future__ import annotations

from bireme.engines.torch.geometry import OTHER_DTYPE, Capability, why_no_bfloat16
from bireme.engines.torch.native import cpu
from bireme.errors import ConfigError

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def choose(asked: str, own: str | None, gpu: Capability | None) -> str:
    """Return the name of the dtype. Raises ConfigError. `own`: config.json's. `gpu`: None for a CPU.

    auto: the checkpoint's own, or float32 in place of what the CPU or GPU has no instructions for.
    """
    if asked != "auto":
        if asked not in ITEM_BYTES:
            raise ConfigError(f"dtype: {asked!r}; the torch engine has auto, {', '.join(ITEM_BYTES)}")
        if asked == "bfloat16" and gpu is not None and (why := why_no_bfloat16(gpu)):
            raise ConfigError(f"dtype: {asked!r}; {why}; {OTHER_DTYPE}")
        return asked
    if own not in ITEM_BYTES:
        return "float32"
    if gpu is not None:
        return "float32" if own == "bfloat16" and why_no_bfloat16(gpu) else own
    return own if own == "bfloat16" and cpu.multiplies_bfloat16() else "float32"
