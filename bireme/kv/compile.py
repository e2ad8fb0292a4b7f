"""Compile all that routing, KV events and host memory run as machine code, so that no first start waits for it.

    python -m bireme.kv.compile     # half a minute of CPU; by the user who will serve, on the CPU that will

The code is kept beside the source, or in the user's cache where that can't be written.
"""

from __future__ import annotations

import importlib
import pkgutil

from bireme import kv

KERNELS = tuple(
    module.name for module in pkgutil.walk_packages(kv.__path__, f"{kv.__name__}.") if module.name.endswith("_kernels")
)

if __name__ == "__main__":
    for name in KERNELS:
        importlib.import_module(name)
