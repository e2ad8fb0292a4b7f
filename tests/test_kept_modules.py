"""What a run's first process compiles for the others (conftest.py)."""

from __future__ import annotations

import pytest
from _pytest.assertion import rewrite

from tests.conftest import keep_rewritten, modules_of


def test_a_module_is_kept_with_its_asserts_rewritten(tmp_path, pytestconfig):
    module = tmp_path / "test_it.py"
    module.write_text("def test_it():\n    assert 1 + 1 == 3\n")
    keep_rewritten(module, pytestconfig)
    names = {}
    exec(rewrite._read_pyc(module, rewrite.get_cache_dir(module) / f"test_it{rewrite.PYC_TAIL}"), names)
    with pytest.raises(AssertionError, match=r"assert \(1 \+ 1\) == 3"):
        names["test_it"]()


def test_modules_are_those_that_the_run_collects(pytestconfig, monkeypatch):
    monkeypatch.setattr(pytestconfig, "args", ["tests/planner", "tests/text/test_stop.py::test_it", "tests/clients"])
    monkeypatch.setattr(pytestconfig.option, "markexpr", "not server and not soak")
    found = {str(module.relative_to(pytestconfig.rootpath)) for module in modules_of(pytestconfig)}
    assert {"tests/planner/test_planner.py", "tests/text/test_stop.py"} <= found
    assert not any(name.startswith("tests/clients") or not name.endswith(".py") for name in found)
