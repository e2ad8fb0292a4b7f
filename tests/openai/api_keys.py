"""API keys of tests: each is its own name."""

from __future__ import annotations

import hashlib
from typing import Any

from bireme.openai.keys import ApiKeys, KeyEntry


def keys_of(*names: str, **limits: Any) -> ApiKeys:
    hashes = [hashlib.sha256(name.encode()).hexdigest() for name in names]
    return ApiKeys(tuple(KeyEntry(name=name, sha256=one, **limits) for name, one in zip(names, hashes, strict=True)))


def bearer(name: str) -> dict[str, str]:
    """Return the headers of a request with a key."""
    return {"authorization": f"Bearer {name}"}
