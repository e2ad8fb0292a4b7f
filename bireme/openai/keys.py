"""API keys: who may call, how much a minute, and under which cache salt.

The file holds hashes of keys, never keys; `tools/make_api_key.py NAME` makes one.

    keys:
      - name: alice                  # for logs and metrics
        sha256: 9f86d081884c7d65...  # of the key, hex
        requests_per_minute: 600     # all optional: without, no limit
        tokens_per_minute: 200000    # prompt and generated tokens
        max_concurrent_requests: 64
        max_priority: 0.5            # 0 to 1; a higher priority is lowered to it
        operator: true               # false, as without: it is not told of other keys and of workers

Generated tokens count when they are known, so the answer that exhausts a budget is not cut. A file that changes is read
again: a key that is gone is refused from then on, requests under way go on.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from bireme import yaml_text
from bireme.conversion import convert
from bireme.errors import ConfigError
from bireme.openai.http.error_replies import HttpError, RateLimitError
from bireme.openai.token_bucket import TokenBucket
from bireme.settings import Positive, Settings

KEY_HEADERS = (b"authorization", b"x-api-key")


class KeyEntry(Settings, frozen=True, kw_only=True):
    """One key of the file."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[\w.@-]{1,64}$")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}$")]
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    max_concurrent_requests: Positive | None = None
    max_priority: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    operator: bool = False


class KeyFile(Settings, frozen=True, kw_only=True):
    keys: tuple[KeyEntry, ...]


Share = Callable[[int | None], int | None]


def _whole(limit: int | None) -> int | None:
    return limit


def _bucket(per_minute: int | None) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute)


class Tenant:
    """The holder of a key, with what is left of its limits. Used on one loop."""

    def __init__(self, entry: KeyEntry | None, share: Share = _whole) -> None:
        self.name = entry.name if entry else ""
        self._share = share
        self._num_active = 0
        self._set(entry)

    def change(self, entry: KeyEntry) -> None:
        """Go on with another hash or other limits under the same name; what is under way counts on."""
        if entry != self._entry:
            self._set(entry)

    def _set(self, entry: KeyEntry | None) -> None:
        self._entry, share = entry, self._share
        self._salt = hashlib.sha256(b"bireme cache salt " + bytes.fromhex(entry.sha256)).hexdigest() if entry else ""
        self._requests = _bucket(share(entry.requests_per_minute) if entry else None)
        self._tokens = _bucket(share(entry.tokens_per_minute) if entry else None)
        self._max_active = share(entry.max_concurrent_requests) if entry else None
        self.max_priority = entry.max_priority if entry else 1.0
        self.is_operator = entry.operator if entry else True

    def begin(self) -> None:
        """Count a running request; `end` counts it out. Raises RateLimitError."""
        if self._max_active is not None and self._num_active >= self._max_active:
            raise RateLimitError(f"{self._num_active} requests of this key are under way, its limit", 1)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1):
                raise RateLimitError("the key's requests_per_minute are used up", wait_s)
            self._requests.take(1)
        self._num_active += 1

    def end(self) -> None:
        self._num_active -= 1

    def keep(self) -> None:
        """Count something that outlives the request, such as a job; `end` counts it out."""
        self._num_active += 1

    def take_prompt(self, num_tokens: int) -> None:
        """Raises RateLimitError when the prompt exceeds what is left."""
        if self._tokens is None:
            return
        if wait_s := self._tokens.wait_s(num_tokens):
            raise RateLimitError("the key's tokens_per_minute are used up", wait_s)
        self._tokens.take(num_tokens)

    def take_generated(self, num_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def cache_salt(self, asked: str) -> str:
        """Return the salt of this tenant's prompts: no two tenants share KV blocks, whatever they ask for."""
        return f"{self._salt}.{asked}" if self._salt else asked


OPEN = Tenant(None)  # everybody, where no keys are set


class ApiKeys:
    """All keys of a frontend."""

    def __init__(self, entries: tuple[KeyEntry, ...], share: Share = _whole, canary_key: str = "") -> None:
        """`share` gives this process's part of a limit, where several serve the same port. `canary_key`: one more, by
        which the launch checks this process; empty: none.
        """
        self._share = share
        self._canary = [(hashlib.sha256(canary_key.encode()).digest(), OPEN)] if canary_key else []
        self._tenants: list[tuple[bytes, Tenant]] = []
        self._names: dict[str, str] = {}  # cache salt -> name, of former keys too: their requests may be under way
        self.replace(entries)

    def replace(self, entries: tuple[KeyEntry, ...]) -> None:
        """Take these keys from now on; one of a known name keeps what is left of its limits, unless they change."""
        known = {tenant.name: tenant for _, tenant in self._tenants}
        tenants = []
        for entry in entries:
            tenant = known.get(entry.name) or Tenant(entry, self._share)
            tenant.change(entry)
            tenants.append((bytes.fromhex(entry.sha256), tenant))
        self._tenants = tenants + self._canary
        self._names |= {tenant.cache_salt("").rstrip("."): tenant.name for _, tenant in tenants}

    def tenant(self, authorization: Sequence[bytes], api_key: Sequence[bytes] = ()) -> Tenant:
        """Return the tenant of these headers (KEY_HEADERS). Raises HttpError 401.

        Every key is compared, in constant time, also after a match.
        """
        key = _key_of(authorization, api_key)
        digest = hashlib.sha256(key).digest()
        found = [tenant for own, tenant in self._tenants if hmac.compare_digest(own, digest)]
        if not found:
            raise _unauthorized("the API key is not known here")
        return found[0]

    def named(self, name: str) -> Tenant | None:
        """Return the tenant whose key has this name; None: there is none now."""
        return next((tenant for _, tenant in self._tenants if tenant.name == name), None)

    def name_of(self, cache_salt: str) -> str:
        """Return the name of the key under whose salt a request runs; "": of none."""
        return self._names.get(cache_salt.partition(".")[0], "")


def _key_of(authorization: Sequence[bytes], api_key: Sequence[bytes]) -> bytes:
    """Raises HttpError 401 unless the headers hold one key."""
    if len(authorization) > 1 or len(api_key) > 1 or not (authorization or api_key):
        raise _unauthorized("send one header `Authorization: Bearer KEY`, or `x-api-key: KEY`")
    if not authorization:
        return api_key[0]
    scheme, _, key = authorization[0].partition(b" ")
    if scheme.lower() != b"bearer" or not key:
        raise _unauthorized("send the key as `Authorization: Bearer KEY`, or as `x-api-key: KEY`")
    if api_key and api_key[0] != key:
        raise _unauthorized("Authorization and x-api-key hold different keys; send one of them")
    return key


def load_keys(path: Path, share: Share = _whole) -> ApiKeys:
    """Read a key file. Raises ConfigError."""
    return ApiKeys(read_keys(path), share, os.environ.get("BIREME_CANARY_KEY", ""))


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """Return a key file's entries. Raises ConfigError."""
    try:
        tree = yaml_text.read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: no date, no number, no UTF-8
        raise ConfigError(f"API keys: {path} can't be read: {type(error).__name__}; check the file") from error
    entries = convert(tree, KeyFile, str(path)).keys
    if not entries:
        raise ConfigError(f"{path}: no keys; add one with tools/make_api_key.py NAME, or serve without a file")
    for values in ([entry.name for entry in entries], [entry.sha256.lower() for entry in entries]):
        if len(set(values)) < len(values):
            raise ConfigError(f"{path}: a name or a hash is there twice; make them unique")
    return entries


def _unauthorized(message: str) -> HttpError:
    return HttpError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))
