"""How much a reader has to hold at once: branches of a function, and modules that can't be read one by one."""

from __future__ import annotations

import ast
import graphlib
from functools import cache

from tests.repository.house import MODULES, PACKAGE, functions_of, imports_of, name_of

MANY, TOO_MANY = 10, 20  # branches
MOST_WITH_MANY = 0.6  # functions in 1,000 lines
# Compiled for arrays (numba, Triton): a call would cost more than what it decides.
KERNELS = (PACKAGE / "kv" / "kernels", PACKAGE / "engines" / "torch" / "kernels")
BRANCHES = (
    *(ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert),
    *(ast.comprehension, ast.match_case),
)


def own_nodes(function):
    """Yield the nodes of a function; inner ones, and classes, have their own."""
    left = [function]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            yield node
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                left.append(node)


def num_branches(function):
    """Count as cyclomatic complexity does: each condition, loop, handler, case and operand."""
    count = 1
    for node in own_nodes(function):
        count += isinstance(node, BRANCHES)
        if isinstance(node, ast.comprehension):
            count += len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


@cache
def branches_in(path):
    """Return how many each function has, by its place."""
    return {f"{name_of(path)}:{node.lineno} {node.name}": num_branches(node) for node in functions_of(path)}


def functions_above(limit, paths):
    """Return each function with more branches, by its place, and how many it has."""
    return {place: count for path in paths for place, count in branches_in(path).items() if count > limit}


def test_branches_are_counted_as_written_here():
    (function,) = ast.parse(
        "def f(a):\n if a and b or c: pass\n else: d = [x if x else y for x in a if x]\n"
        " match a:\n  case 1: pass\n  case _: assert a\n def inner():\n  if a: pass\n"
    ).body
    assert num_branches(function) == 1 + 1 + 2 + 1 + 2 + 2 + 1


def test_no_function_but_kernels_has_too_many_branches():
    assert functions_above(TOO_MANY, [path for path in MODULES if path.parent not in KERNELS]) == {}


def test_few_functions_have_many_branches():
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES)
    found = functions_above(MANY, MODULES)
    assert len(found) <= MOST_WITH_MANY * num_lines / 1000, found


def module_of(path):
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def test_no_modules_import_each_other_not_even_for_types():
    modules = {module_of(path): path for path in MODULES}
    arrows = {}
    for module, path in modules.items():
        names = [found.module for found in imports_of(path)]
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        arrows[module] = (targets & modules.keys()) - {module}
    graphlib.TopologicalSorter(arrows).prepare()  # CycleError names the circle
