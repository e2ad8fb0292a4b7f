"""A tiny generation that proves a path works, with a cache_salt of its own: it finds and leaves no reusable KV."""

from __future__ import annotations

import http.client
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

_PROMPT_IDS = [1, 2, 3]  # ids that every vocabulary has
_PROMPT_TEXT = "a"
# Triton's own words for a stub that does not react within a second.
_UNHEALTHY = re.compile(r"Stub process .* is not healthy")


@dataclass(frozen=True, slots=True)
class CanaryResult:
    error: str = ""  # empty: it worked
    is_silent: bool = False  # the stub said nothing itself; an error of its own is an answer

    @property
    def is_ok(self) -> bool:
        return not self.error


def probe_decode(http: str, model: str, timeout_s: float) -> CanaryResult:
    """Generate one token with a decode worker itself."""
    return _probe(http, f"/v2/models/{model}/generate_stream", {"input_ids": _PROMPT_IDS}, timeout_s)


def probe_pipeline(http: str, model: str, timeout_s: float) -> CanaryResult:
    """Generate one token by way of tokenizer, prefill and decode."""
    return _probe(http, f"/v2/models/{model}/generate", {"text_input": _PROMPT_TEXT}, timeout_s)


def _probe(address: str, path: str, prompt: dict[str, Any], timeout_s: float) -> CanaryResult:
    body = prompt | {"max_tokens": 1, "cache_salt": f"canary-{secrets.token_hex(8)}"}
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        error = _error_in(response.status, response.read().decode(errors="replace"))
        return CanaryResult(error, is_silent=bool(_UNHEALTHY.search(error)))
    except TimeoutError:
        return CanaryResult(f"no answer within {timeout_s:g} s", is_silent=True)
    except (OSError, http.client.HTTPException) as error:
        return CanaryResult(f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def _error_in(status: int, text: str) -> str:
    """Errors in mid-stream come with status 200, as an event of their own."""
    for line in text.splitlines():
        try:
            event = json.loads(line.removeprefix("data:").strip() or "{}")
        except ValueError:
            continue
        if isinstance(event, dict) and "error" in event:
            return str(event["error"])
    return "" if status == 200 else f"HTTP {status}"
