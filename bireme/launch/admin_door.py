"""The admin door: an HTTP port of its own by which an operator, a preStop hook or a planner acts on a running launch.

Every call shows the key (`Authorization: Bearer`) or, where client certificates are asked for, a certificate of that
authority. A POST has a JSON body, so no web page can send one unasked. Bodies, threads and waits are bounded.
"""

from __future__ import annotations

import hashlib
import hmac
import http.server
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from bireme.config import BusyRule
from bireme.discovery.live_settings import LogLevel
from bireme.discovery.plan_notes import PlanNote
from bireme.errors import BiremeError, ConfigError, NotFoundError, RequestError
from bireme.launch.console import Console
from bireme.launch.health_server import SmallHttpServer
from bireme.launch.operations import ConflictError, Operations
from bireme.launch.ports import LOOPBACK

MIN_KEY_CHARACTERS = 16
_MAX_BODY_BYTES = 64 << 10
_MAX_CALLS = 16  # at once
_REMEDY = "`openssl rand -hex 32` makes one"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """Files in PEM; "": none."""

    port: int  # 0: any free one
    host: str = LOOPBACK
    key_file: str = ""  # read at each call, so that it can be changed
    certificate: str = ""  # with it the door speaks https
    certificate_key: str = ""
    client_authority: str = ""  # of clients' certificates, which are then asked for

    def check(self) -> None:
        """Raises ConfigError."""
        if not self.key_file and not self.client_authority:
            raise ConfigError(
                f"--admin-port {self.port}: nobody could be told from anybody; give --admin-key-file (a file with a"
                f" key, {_REMEDY}) or --admin-client-ca"
            )
        if bool(self.certificate) != bool(self.certificate_key):
            raise ConfigError("--admin-tls-cert and --admin-tls-key belong together; give both, or none")
        if self.client_authority and not self.certificate:
            raise ConfigError("--admin-client-ca: clients show certificates to https alone; give --admin-tls-cert, too")
        if self.key_file:
            read_key(Path(self.key_file))
        self.tls_context()

    def tls_context(self) -> ssl.SSLContext | None:
        """None: it speaks http. Raises ConfigError."""
        if not self.certificate:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.certificate_key, password="")  # "": never ask the terminal
            if self.client_authority:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.client_authority)
        except (OSError, ValueError) as error:
            names = f"--admin-tls-cert {self.certificate}, --admin-tls-key {self.certificate_key}"
            raise ConfigError(
                f"{names}, --admin-client-ca {self.client_authority or '-'}: they can't be used ({error}); give a"
                " certificate, its own unencrypted key, and the authority of clients, in PEM"
            ) from error
        return context


def read_key(path: Path) -> bytes:
    """Return the key's digest. Raises ConfigError."""
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-key-file {path}: it can't be read ({error}); {_REMEDY}") from error
    if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or len(key.split()) != 1:
        raise ConfigError(
            f"--admin-key-file {path}: one line of at least {MIN_KEY_CHARACTERS} ASCII characters is a key; {_REMEDY}"
        )
    return hashlib.sha256(key.encode()).digest()


class _DoorBody(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Worker(_DoorBody):
    worker: str


class _DrainBody(_DoorBody):
    worker: str = ""  # "": the whole server
    force: bool = False


class _UndrainBody(_DoorBody):
    worker: str = ""


class _SleepBody(_Worker):
    free_weights: bool = False
    force: bool = False


class _LogLevelBody(_DoorBody):
    level: LogLevel | None


class _BusyBody(_DoorBody):
    rules: tuple[BusyRule, ...] | None


class _WeightBody(_DoorBody):
    weight: Annotated[float, msgspec.Meta(ge=0, le=1)] | None


class _MirrorBody(_DoorBody):
    url: str | None  # None: no more copies
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    key_file: str = ""
    ca_file: str = ""
    generation: int | None = None


_Action = Callable[[Any], dict[str, Any]]


class AdminDoor:
    """`start`, `stop`."""

    def __init__(self, settings: AdminSettings, operations: Operations, console: Console) -> None:
        """Raises ConfigError; OSError where the port can't be had."""
        settings.check()
        self._settings, self._operations, self._console = settings, operations, console
        self._looks: dict[str, Callable[[], dict[str, Any]]] = {
            "/status": operations.status,
            "/pages": operations.pages,
        }
        self._actions: dict[str, tuple[type[msgspec.Struct], _Action]] = {
            "/drain": (_DrainBody, lambda body: operations.drain(body.worker, force=body.force)),
            "/undrain": (_UndrainBody, lambda body: operations.undrain(body.worker)),
            "/sleep": (
                _SleepBody,
                lambda body: operations.sleep(body.worker, free_weights=body.free_weights, force=body.force),
            ),
            "/wake": (_Worker, lambda body: operations.wake(body.worker)),
            "/log-level": (_LogLevelBody, lambda body: operations.set_log_level(body.level)),
            "/busy": (_BusyBody, lambda body: operations.set_busy(body.rules)),
            "/mirror": (
                _MirrorBody,
                lambda body: operations.set_mirror(body.url, body.share, body.key_file, body.generation, body.ca_file),
            ),
            "/plan": (PlanNote, operations.note_plan),
            "/weight": (_WeightBody, lambda body: operations.set_weight(body.weight)),
        }
        self._calls = threading.BoundedSemaphore(_MAX_CALLS)
        self._server = SmallHttpServer(settings.host, settings.port, self._handler())
        self._server.tls = settings.tls_context()
        self.port = self._server.port

    @property
    def is_plain(self) -> bool:
        """Whether keys cross the network unencrypted."""
        return self._server.tls is None

    def start(self) -> None:
        self._server.start("admin-http")

    def stop(self) -> None:
        self._server.stop()

    def answer(self, method: str, path: str, key: str, kind: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and reply. `key`: the Authorization header. `kind`: the body's type."""
        if not self._is_allowed(key):
            return 401, {"error": "Authorization: send `Bearer` and the launch's admin key"}
        if method == "GET":
            return self._tell(path)
        if path not in self._actions:
            return 404, self._unknown(path)
        if kind.partition(";")[0].strip().lower() != "application/json":
            return 415, {"error": "content-type: send application/json"}
        form, act = self._actions[path]
        try:
            return 200, act(msgspec.json.decode(body or b"{}", type=form))
        except msgspec.MsgspecError as error:
            fields = ", ".join(field.name for field in msgspec.structs.fields(form))
            return 400, {"error": f"body: {error}; send a JSON object with {fields}"}
        except BiremeError as error:
            return _status_of(error), {"error": str(error)}

    def _tell(self, path: str) -> tuple[int, dict[str, Any]]:
        if (look := self._looks.get(path)) is None:
            return 404, self._unknown(path)
        try:
            return 200, look()
        except BiremeError as error:
            return _status_of(error), {"error": str(error)}

    def _unknown(self, path: str) -> dict[str, Any]:
        return {"error": f"{path[:100]}: GET {', '.join(self._looks)}; POST {', '.join(self._actions)}"}

    def _is_allowed(self, authorization: str) -> bool:
        """With client certificates alone, who has none did not get this far."""
        if not self._settings.key_file:
            return True
        scheme, _, given = authorization.partition(" ")
        try:
            known = read_key(Path(self._settings.key_file))
        except ConfigError as error:
            self._console.event("admin_key_unread", "error", error=error)
            return False
        is_same = hmac.compare_digest(known, hashlib.sha256(given.strip().encode("utf-8", "replace")).digest())
        return is_same and scheme.lower() == "bearer"

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        door = self

        class DoorHandler(http.server.BaseHTTPRequestHandler):
            server_version = "bireme"
            sys_version = ""

            def do_GET(self) -> None:
                self._reply(*door.answer("GET", self._path, self._key, "", b""))

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if not length.isdigit():
                    self._reply(411, {"error": "content-length: missing; send the body's"})
                elif int(length) > _MAX_BODY_BYTES:
                    self._reply(413, {"error": f"body: {length[:20]} bytes; at most {_MAX_BODY_BYTES}"})
                elif not door._calls.acquire(blocking=False):
                    self._reply(503, {"error": f"{_MAX_CALLS} calls are under way; try again"})
                else:
                    try:
                        body, kind = self.rfile.read(int(length)), self.headers.get("Content-Type", "")
                        self._reply(*door.answer("POST", self._path, self._key, kind, body))
                    finally:
                        door._calls.release()

            @property
            def _path(self) -> str:
                return self.path.split("?")[0]

            @property
            def _key(self) -> str:
                return self.headers.get("Authorization", "")

            def _reply(self, status: int, body: dict[str, Any]) -> None:
                payload = msgspec.json.encode(body)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.send_header("Cache-Control", "no-store")
                if status == 401:
                    self.send_header("WWW-Authenticate", "Bearer")
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *arguments: object) -> None:
                """What was asked stands in the log as operator_asked; who asks for the status does so often."""

        return DoorHandler


def _status_of(error: BiremeError) -> int:
    for kind, status in ((NotFoundError, 404), (RequestError, 400), (ConflictError, 409)):
        if isinstance(error, kind):
            return status
    return 503
