"""TLS of tritonserver's gRPC port, both sides with certificates: `grpc_tls` of the recipe.

A server's certificate is also what a client shows, so a host needs one pair. A new one needs a restart.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bireme.config import Recipe
from bireme.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GrpcTls:
    """Files in PEM."""

    certificate: Path
    key: Path
    authority: Path
    server_name: str  # that certificates of servers are for; "": the host of their address

    @classmethod
    def of(cls, recipe: Recipe) -> GrpcTls | None:
        """None: the recipe has no TLS. Raises ConfigError."""
        config = recipe.grpc_tls
        if not config.certificate:
            return None
        named = (config.certificate, config.key, config.authority)
        files = (Path(recipe.folder) / Path(os.path.expandvars(name)).expanduser() for name in named)
        certificate, key, authority = files
        tls = cls(certificate, key, authority, config.server_name)
        tls.client_context()
        return tls

    def client_context(self) -> ssl.SSLContext:
        """Return a context for a port of this launch: it does not look at the other side's. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        try:
            context.load_verify_locations(self.authority)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"grpc_tls.authority: {self.authority} can't be used ({error}); give the authority's certificate in PEM"
            ) from error
        try:
            context.load_cert_chain(self.certificate, self.key, password="")  # "": never ask the terminal
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"grpc_tls.certificate: {self.certificate}, grpc_tls.key: {self.key}: they can't be used ({error});"
                " give a certificate and its own, unencrypted key in PEM"
            ) from error
        return context

    def server_flags(self) -> list[str]:
        return [
            "--grpc-use-ssl=true",
            "--grpc-use-ssl-mutual=true",
            f"--grpc-server-cert={self.certificate}",
            f"--grpc-server-key={self.key}",
            f"--grpc-root-cert={self.authority}",
        ]

    def channel(self, address: str, options: list[tuple[str, Any]]) -> Any:
        """Return a grpc.aio channel. Raises OSError."""
        import grpc.aio

        credentials = grpc.ssl_channel_credentials(
            self.authority.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()
        )
        if self.server_name:
            options = [*options, ("grpc.ssl_target_name_override", self.server_name)]
        return grpc.aio.secure_channel(address, credentials, options)
