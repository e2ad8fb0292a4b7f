"""The admin door's other side, for programs: tools/drain.py, sleep.py, status.py."""

from __future__ import annotations

import argparse
import http.client
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bireme.errors import BiremeError, ConfigError, NotFoundError, UnavailableError

ADDRESS_VARIABLE, KEY_VARIABLE = "BIREME_ADMIN", "BIREME_ADMIN_KEY"


@dataclass(frozen=True, slots=True)
class DoorClient:
    """One call, one connection."""

    address: str  # http[s]://host:port
    key: str = ""
    authority: str = ""  # file with that of the door's certificate; "": the system's
    certificate: tuple[str, str] | None = None  # own, and its key
    timeout_s: float = 15.0

    def status(self) -> dict[str, Any]:
        """Raises BiremeError."""
        return self._call("GET", "/status")

    def pages(self) -> dict[str, Any]:
        """Return metrics, and its host's clock. Raises BiremeError."""
        return self._call("GET", "/pages")

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        """Raises BiremeError with the door's reason."""
        return self._call("POST", path, msgspec.json.encode(fields))

    def _call(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        try:
            connection = self._connection()
            try:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                status, text = response.status, response.read()
            finally:
                connection.close()
            answer = msgspec.json.decode(text, type=dict[str, Any])
        except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
            raise UnavailableError(f"{self.address}: no admin door answers there ({error})") from error
        if status == http.client.OK:
            return answer
        kind = NotFoundError if status == http.client.NOT_FOUND else BiremeError
        raise kind(str(answer.get("error", f"HTTP {status}")))

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
            raise ConfigError(f"--admin {self.address}: write http://host:port, or https://host:port")
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout_s)
        context = ssl.create_default_context(cafile=self.authority or None)
        if self.certificate is not None:
            context.load_cert_chain(*self.certificate)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=self.timeout_s, context=context)


def add_door_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--admin", default=os.environ.get(ADDRESS_VARIABLE, ""), metavar="URL",
        help=f"the launch's admin door, http[s]://host:port; default ${ADDRESS_VARIABLE}",
    )  # fmt: skip
    parser.add_argument("--admin-key-file", metavar="FILE", help=f"with its key; default ${KEY_VARIABLE}")
    parser.add_argument("--admin-ca", default="", metavar="FILE", help="authority of its certificate")
    parser.add_argument("--admin-cert", metavar="FILE", help="certificate to show, where the door asks for one")
    parser.add_argument("--admin-cert-key", metavar="FILE", help="its key")


def door_of(options: argparse.Namespace) -> DoorClient | None:
    """None: no door was named. Raises ConfigError."""
    if not options.admin:
        return None
    if bool(options.admin_cert) != bool(options.admin_cert_key):
        raise ConfigError("--admin-cert and --admin-cert-key belong together; give both, or none")
    key = os.environ.get(KEY_VARIABLE, "")
    if options.admin_key_file:
        try:
            key = Path(options.admin_key_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--admin-key-file {options.admin_key_file}: it can't be read ({error})") from error
    certificate = (options.admin_cert, options.admin_cert_key) if options.admin_cert else None
    return DoorClient(options.admin, key, options.admin_ca, certificate)
