"""Certificates of 127.0.0.1 that nobody else knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def write_pair(folder: Path, name: str) -> tuple[str, str]:
    """Replace the certificate and key in a folder by new ones, of this name."""
    folder.mkdir(exist_ok=True)
    new = [folder / "new.crt", folder / "new.key"]
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-out", new[0], "-keyout", new[1],
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl can't make a certificate here")
    certificate, key = (str(path.replace(path.with_stem("pair"))) for path in new)
    return certificate, key
