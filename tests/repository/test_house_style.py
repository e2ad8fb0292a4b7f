"""How the package is written: docstrings on top, plain names, nothing that runs what it reads."""

from __future__ import annotations

import ast
import re

import pytest

from bireme.metrics import TABLE
from tests.repository.house import CHECKOUT, MODULES, functions_of, name_of, nodes_of, tree_of

MAX_FILE_LINES = 700
VAGUE = {"utils", "util", "helper", "helpers", "misc", "common", "manager2", "data", "info"}
PROGRAMS = [*MODULES, *sorted((CHECKOUT / "tools").rglob("*.py"))]
RUNS_WHAT_IT_READS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "yaml.load",
    "yaml.unsafe_load",
    "torch.load",
    "pickle.loads",
}


def test_every_module_says_what_it_is():
    assert [
        name_of(path) for path in MODULES if path.read_text().strip() and not ast.get_docstring(tree_of(path))
    ] == []


def _has_code(tree):
    return any(not (isinstance(node, ast.ImportFrom) and node.module == "__future__") for node in tree.body)


def test_file_names_are_nouns_that_say_something():
    assert [name_of(path) for path in MODULES if not re.fullmatch(r"[a-z][a-z0-9_]*|__\w+__", path.stem)] == []
    assert [name_of(path) for path in MODULES if path.stem in VAGUE] == []


def test_a_class_name_stands_for_one_thing():
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(f"{name_of(path)}:{node.lineno}")
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_file_is_a_heap():
    assert [name_of(path) for path in MODULES if len(path.read_text().splitlines()) > MAX_FILE_LINES] == []


def test_modules_of_tests_carry_no_annotations():
    """What others import (support modules, fixtures of a conftest) carries all of them: ruff's ANN."""
    found = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in (CHECKOUT / "tests").rglob("test_*.py")
        for node in functions_of(path)
        if node.returns or any(isinstance(child, ast.arg) and child.annotation for child in ast.walk(node.args))
    ]
    assert found == []


def test_only_tests_that_inject_faults_are_run_again():
    found = [
        name_of(path)
        for path in (CHECKOUT / "tests").rglob("test_*.py")
        if "mark.flaky" in (text := path.read_text()) and not re.search(r"SIGKILL|SIGSTOP|kill\(", text)
    ]
    assert found == []


def test_function_names_are_plain():
    odd = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in MODULES
        for node in functions_of(path)
        if not re.fullmatch(r"_{0,2}[a-z][a-z0-9_]*_{0,2}|do_[A-Z]+", node.name)
    ]
    assert odd == []


def values_returned_by(function):
    """Yield the returns with a value; inner functions have their own."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node) != "return None":
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from values_returned_by(node)


def test_a_function_that_returns_nothing_does_not_read_as_if_it_returned_something():
    found = [
        f"{name_of(path)}:{node.lineno} {ast.unparse(node)}"
        for path in MODULES
        for function in functions_of(path)
        if function.returns is not None and ast.unparse(function.returns) == "None"
        for node in values_returned_by(function)
    ]
    assert found == []


def test_nothing_runs_what_it_reads():
    found = [
        f"{name_of(path)}:{node.lineno} {ast.unparse(node.func)}"
        for path in PROGRAMS
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in RUNS_WHAT_IT_READS
    ]
    assert found == []


def test_no_bare_except():
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in PROGRAMS
        for node in nodes_of(path)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert found == []


def test_no_print_in_the_package():
    """Log lines go through logging; programs print."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        if "launch" not in path.parts
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert found == []


@pytest.mark.parametrize("method", ["add", "set", "observe"])
def test_every_metric_that_code_changes_is_in_the_table(method):
    unknown = [
        f"{name_of(path)}:{node.lineno} {node.args[0].value}"
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).startswith("bireme_")
        and node.args[0].value not in TABLE
    ]
    assert unknown == []


def test_metric_names_follow_prometheus():
    for spec in TABLE.values():
        assert re.fullmatch(r"(bireme|nv_trt_llm|trtllm)_[a-z0-9_]+", spec.name)
        assert spec.kind != "counter" or spec.name.endswith("_total")
        assert bool(spec.buckets) == (spec.kind == "histogram")
        assert list(spec.buckets) == sorted(set(spec.buckets))
