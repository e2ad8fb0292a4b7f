"""Python environments made of what this one has, without fetching anything."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))


def make_environment(folder: Path, python: str, without: tuple[str, ...]) -> Path:
    """Make a virtual environment that has this one's packages but those named, by links; return its site-packages.

    It is one as tools make them, its Python sees nothing else, and nothing is fetched.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    (target,) = folder.glob("lib/python3*/site-packages")
    for entry in SITE.iterdir():
        name = re.split(r"[-.]", entry.name.lower().lstrip("_"))[0]
        if name not in without and not entry.name.startswith("__"):
            (target / entry.name).symlink_to(entry)
    return target


def add_distribution(site: Path, name: str, version: str) -> None:
    """Make pip and importlib.metadata say that `name` is installed."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")
