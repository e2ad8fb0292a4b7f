"""KV from a context engine to a generation engine: a file that the receiver takes away.

`opaque_state` names it, or `ctx_info_endpoint` with the Python transceiver. A file that is gone is a transfer that
never comes: the receiver waits for kv_transfer_timeout_ms (for ever when that is unset), as the real one does.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any


def export(cache: Any, length: int) -> tuple[bytes, Path]:
    """Write the keys and values of every layer; return the opaque state and the file."""
    import torch

    folder = Path(os.environ.get("BIREME_RUN_DIR") or tempfile.gettempdir())
    path = folder / f"trtllm-stand-in-{os.getpid()}-{secrets.token_hex(6)}.kv"
    draft = path.with_suffix(".part")
    layers = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    torch.save(layers, draft)
    draft.rename(path)
    return json.dumps({"path": str(path), "length": length}).encode(), path


def claim(params: Any) -> Any | None:
    """Return the layers, once; None when somebody has taken them or the sender has let go."""
    import torch

    if params.opaque_state is not None:
        path = Path(json.loads(params.opaque_state)["path"])
    else:
        path = Path(params.ctx_info_endpoint.removeprefix("file://"))
    mine = path.with_suffix(f".{os.getpid()}")
    try:
        path.rename(mine)
    except FileNotFoundError:
        return None
    layers = torch.load(mine)
    mine.unlink()
    return layers


def fill(cache: Any, layers: Any) -> Any:
    for at, (keys, values) in enumerate(layers):
        cache.update(keys, values, at)
    return cache
