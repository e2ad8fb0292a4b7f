"""Which dtype the weights get. Needs no torch: a program that starts engines says with it what they will take."""

from __future__ import annotations

from bireme.engines.torch.native import cpu
from bireme.errors import ConfigError

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def choose(asked: str, own: str | None, has_gpu: bool) -> str:
    """Return the name of the dtype. Raises ConfigError. `own`: config.json's.

    auto: the checkpoint's own; without a GPU float32 in place of what the CPU has no instructions for.
    """
    if asked != "auto":
        if asked not in ITEM_BYTES:
            raise ConfigError(f"dtype: {asked!r}; the torch engine has auto, {', '.join(ITEM_BYTES)}")
        return asked
    if own not in ITEM_BYTES:
        return "float32"
    return own if has_gpu or (own == "bfloat16" and cpu.multiplies_bfloat16()) else "float32"
