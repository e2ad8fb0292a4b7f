"""A small HTTP client of one tritonserver: readiness, metrics, and the model repository."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from bireme.errors import BiremeError, UnavailableError

ADMIN_HEADER = "bireme-admin-key"
# What only the launcher may call: loading and unloading, tracing, log settings.
RESTRICTED_APIS = ("model-repository", "trace", "logging")
# Triton's refusal of a restricted API names the header that it expects; this text names the remedy.
SHM_HEADER = "start-serve-py-with-allow-client-shm"
_PROXY_FREE = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class AdminClient:
    """Blocking calls, each with a timeout; thread-safe."""

    def __init__(self, http: str, metrics: str, key: str) -> None:
        self._http = f"http://{http}"
        self._metrics = f"http://{metrics}/metrics"
        self._headers = {ADMIN_HEADER: key} if key else {}

    def is_ready(self, timeout_s: float = 1.0) -> bool:
        """Whether the server and the models of its start are ready."""
        try:
            self._call(urllib.request.Request(self._http + "/v2/health/ready"), timeout_s)
        except BiremeError:
            return False
        return True

    def load(self, model: str, timeout_s: float = 900.0) -> None:
        """Return when the model is ready. Raises BiremeError with the model's reason."""
        self._post(f"/v2/repository/models/{model}/load", timeout_s)

    def unload(self, model: str, timeout_s: float = 60.0) -> None:
        """It goes on until its requests have ended."""
        self._post(f"/v2/repository/models/{model}/unload", timeout_s)

    def index(self, timeout_s: float = 10.0) -> dict[str, tuple[str, str]]:
        """Return model -> (state, reason): READY, UNAVAILABLE, LOADING, UNLOADING, "" when never loaded."""
        rows = json.loads(self._post("/v2/repository/index", timeout_s) or b"[]")
        return {row["name"]: (row.get("state", ""), row.get("reason", "")) for row in rows}

    def metrics_text(self, timeout_s: float = 5.0) -> str:
        return self._call(urllib.request.Request(self._metrics), timeout_s).decode()

    def get_json(self, path: str, timeout_s: float = 5.0) -> Any:
        return json.loads(self._call(urllib.request.Request(self._http + path), timeout_s))

    def _post(self, path: str, timeout_s: float) -> bytes:
        return self._call(urllib.request.Request(self._http + path, b"{}", self._headers), timeout_s)

    def _call(self, request: urllib.request.Request, timeout_s: float) -> bytes:
        try:
            with _PROXY_FREE.open(request, timeout=timeout_s) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError as error:
            raise BiremeError(_reason(error)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # the last: it ended within its answer
            raise UnavailableError(f"tritonserver at {request.host} does not answer: {error}") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        body = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return f"HTTP {error.code}"
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}: {body[:500]}"
