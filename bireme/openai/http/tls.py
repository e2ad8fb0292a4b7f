"""TLS of the frontend's port: a certificate chain and its key from files, read again when they change.

Connections that are open go on with what they began with; new ones get the new certificate.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from bireme.errors import ConfigError
from bireme.openai.followed_files import FollowedFiles


class TlsFiles:
    """Both files in PEM; the certificate's with those between it and the authority's."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self.followed = FollowedFiles("tls", (certificate, key), self._check, lambda _: self._load(self.context))
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(self.context)

    def _check(self) -> None:
        """Raises ConfigError; a context that has failed to load a pair can't serve the former one any more."""
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._certificate, self._key, password="")  # "": never ask the terminal
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            pair = f"--tls-cert {self._certificate}, --tls-key {self._key}"
            raise ConfigError(
                f"{pair}: they can't be used ({error}); give a certificate and its own, unencrypted key in PEM"
            ) from error
