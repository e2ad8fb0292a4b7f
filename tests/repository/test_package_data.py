"""Every file of the package is installed with it, those that are no Python too."""

from __future__ import annotations

import tomllib

from tests.repository.house import CHECKOUT, PACKAGE


def test_an_installed_package_has_all_files():
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = settings["tool"]["setuptools"]["package-data"]
    installed = {
        path
        for name, patterns in globs.items()
        for one in patterns
        for path in CHECKOUT.glob(name.replace(".", "/") + f"/{one}")
    }
    others = {
        path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".nbi", ".nbc")
    }
    assert {str(path.relative_to(CHECKOUT)) for path in others - installed} == set()
