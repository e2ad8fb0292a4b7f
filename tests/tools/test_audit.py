"""tools/audit.py: what pip-audit says, and above all what it does not say."""

import json
import sys

import pytest

from tools import audit

PINS = {"jinja2": "3.1.5", "uvicorn": "0.54.0"}
SAFE = [{"name": name, "version": version, "vulns": []} for name, version in PINS.items()]
HOLE = {"id": "CVE-2025-27516", "aliases": ["GHSA-cpwx-vrp4-4pq7"], "fix_versions": ["3.1.6"]}
SKIPPED = {"name": "uvicorn", "skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function: what pip-audit prints -> the exit code, and what is said."""
    program, answer = tmp_path / "pip-audit", tmp_path / "answer"
    program.write_text(f"#!{sys.executable}\nprint(open({str(answer)!r}).read())\n")
    program.chmod(0o755)
    monkeypatch.setattr(audit, "installed", lambda: PINS)
    monkeypatch.setattr(audit, "oldest", lambda: PINS)

    def say(dependencies):
        answer.write_text(dependencies if isinstance(dependencies, str) else json.dumps({"dependencies": dependencies}))
        return audit.main(["--program", str(program)]), capsys.readouterr().out

    return say


def test_packages_without_holes_end_with_0(run):
    code, said = run(SAFE)
    assert code == 0 and "installed: 2 packages looked up, 0 holes, 0 packages of which nothing is known" in said


def test_a_hole_ends_with_1_and_is_told_with_what_mends_it(run):
    code, said = run([SAFE[0] | {"vulns": [HOLE]}, SAFE[1]])
    assert code == 1 and "jinja2 3.1.5: CVE-2025-27516, GHSA-cpwx-vrp4-4pq7; mended in 3.1.6" in said


def test_a_package_of_which_nothing_is_known_is_not_safe(run):
    code, said = run([SAFE[0], SKIPPED])
    assert code == 2 and "unknown  uvicorn 0.54.0" in said and "not found on PyPI" in said


def test_a_hole_counts_more_than_what_is_not_known(run):
    code, said = run([SAFE[0] | {"vulns": [HOLE]}, SKIPPED])
    assert code == 1 and "unknown  uvicorn 0.54.0" in said


def test_a_package_that_is_left_out_is_not_safe(run):
    code, said = run(SAFE[:1])
    assert code == 2 and "unknown  uvicorn 0.54.0" in said


@pytest.mark.parametrize("printed", ["", "ConnectionError", "[]", "{}"])
def test_an_answer_that_is_none_ends_with_2(run, printed):
    code, said = run(printed)
    assert code == 2 and "pip-audit tells nothing" in said


def test_a_program_that_is_not_there_ends_with_2(capsys):
    assert audit.main(["--program", "/nowhere/pip-audit"]) == 2
    assert "/nowhere/pip-audit" in capsys.readouterr().out


def test_an_environment_that_can_t_be_made_ends_with_2(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(audit, "ENVIRONMENT", tmp_path / "environment")
    monkeypatch.setattr(audit, "PIP_AUDIT", f"{tmp_path}/nothing-there")
    assert audit.main([]) == 2
    assert "can't be installed" in capsys.readouterr().out


def test_what_is_installed_and_what_is_let_in_are_looked_up_by_their_releases():
    assert "+" not in audit.installed()["torch"] and "bireme" not in audit.installed()
    assert audit.oldest()["jinja2"] == "3.1.6" and audit.oldest()["nvidia-pytriton"] == "0.7.0"
