"""The environments of `make test-clients`: made once, made anew when the table changes, and the reason where not."""

from __future__ import annotations

import zipfile

import pytest
import yaml

from tools import clients

pytestmark = pytest.mark.slow
METADATA = "Metadata-Version: 2.1\nName: mine\nVersion: 1\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Return a function that writes the table; nothing is asked of the internet."""
    monkeypatch.setattr(clients, "ENVIRONMENTS", tmp_path / ".clients")
    monkeypatch.setattr(clients, "TABLE", tmp_path / "clients.yaml")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return lambda **packages: (tmp_path / "clients.yaml").write_text(yaml.safe_dump(packages))


def wheel(folder):
    path = folder / "mine-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mine.py", "")
        for name, text in (("METADATA", METADATA), ("WHEEL", WHEEL), ("RECORD", "")):
            archive.writestr(f"mine-1.dist-info/{name}", text)
    return str(path)


def test_an_environment_is_kept_until_its_packages_change_and_pips_reason_is_told(tmp_path, table, capsys):
    table(mine=[wheel(tmp_path)])
    folder = clients.environment("mine")
    (module,) = folder.rglob("site-packages/mine.py")
    module.write_text("kept")
    assert clients.environment("mine") == folder and module.read_text() == "kept"
    table(mine=["no-such-client==1"])
    assert clients.main([]) == 1
    assert "mine: not installed: ERROR: No matching distribution found for no-such-client==1" in capsys.readouterr().out
    assert not folder.exists()
