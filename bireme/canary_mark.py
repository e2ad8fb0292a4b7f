"""What tells a launch's canary from a client's request: a cache salt that nobody else can make.

It is signed with the deployment's key, which a launch gives all of its processes in BIREME_KEY, and soon too old: who
has seen one can't hide requests behind it. Canaries are no load: whoever counts requests counts them apart, in
`bireme_canaries_total`.
"""

from __future__ import annotations

import functools
import hmac
import os
import secrets
import time

PARAMETER = "canary"  # of a Triton request that has no cache salt
_PREFIX = "canary."
_PURPOSE = b"bireme canary:"  # disagg.py has the key's other ones
_LIFE_S = 300.0  # no key: a canary's way through the deployment, and what the clocks of its hosts may differ


def new_mark(key: str) -> str:
    """Return a salt that no other canary has. `key`: the deployment's, in hexadecimal."""
    text = f"{_PREFIX}{int(time.time()):x}.{secrets.token_hex(8)}"
    return f"{text}.{_signature(text, key)}"


def is_canary(cache_salt: str) -> bool:
    """Whether this process's launch, or one that shares its key, has made the salt a short time ago."""
    if not cache_salt.startswith(_PREFIX) or not _is_signed(cache_salt, os.environ.get("BIREME_KEY", "")):
        return False
    return abs(time.time() - int(cache_salt.split(".")[1], 16)) < _LIFE_S


@functools.lru_cache(64)  # a request asks in several places
def _is_signed(cache_salt: str, key: str) -> bool:
    text, _, signature = cache_salt.rpartition(".")
    return bool(key) and hmac.compare_digest(signature.encode(), _signature(text, key).encode())


def _signature(text: str, key: str) -> str:
    return hmac.digest(key.lower().encode(), _PURPOSE + text.encode(), "sha256").hex()
