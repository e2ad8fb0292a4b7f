"""What the house rules look at: modules, their imports, model folders, protobuf text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "bireme"
MODEL_FOLDERS = sorted(
    path.parent for part in ("model_repository", "ensembles") for path in CHECKOUT.glob(f"{part}/*/config.pbtxt")
)
PYTHON_MODELS = [folder for folder in MODEL_FOLDERS if (folder / "1" / "model.py").exists()]
MODULES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True)
class Import:
    module: str  # dotted, absolute
    is_lazy: bool  # inside a function
    is_for_types: bool  # under TYPE_CHECKING
    line: int


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    return tuple(_walk(tree_of(path), is_lazy=False, is_for_types=False))


def _walk(node: ast.AST, *, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, is_lazy, is_for_types, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative import"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", is_lazy, is_for_types, child.lineno)
        else:
            checks_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, is_lazy=is_lazy or in_function, is_for_types=is_for_types or checks_types)


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@cache
def functions_of(path: Path) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    return tuple(node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def name_of(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


def parse_pbtxt(path: Path) -> dict[str, list[Any]]:
    """Parse protobuf text into field -> list of values (a list of messages is flattened)."""
    text = re.sub(r"#[^\n]*", "", path.read_text(encoding="utf-8"))
    tokens = re.findall(r'"[^"]*"|[\w.+-]+|[{}\[\]:,]', text)
    message, end = _parse_message(tokens, 0)
    assert end == len(tokens), f"{path}: unbalanced brackets"
    return message


def _parse_message(tokens: list[str], at: int) -> tuple[dict[str, list[Any]], int]:
    message: dict[str, list[Any]] = {}
    while at < len(tokens) and tokens[at] != "}":
        if tokens[at] == ",":
            at += 1
            continue
        name, at = tokens[at], at + 1
        at += tokens[at] == ":"
        value, at = _parse_value(tokens, at)
        message.setdefault(name, []).extend(value)
    return message, at


def _parse_value(tokens: list[str], at: int) -> tuple[list[Any], int]:
    if tokens[at] == "{":
        message, at = _parse_message(tokens, at + 1)
        return [message], at + 1
    if tokens[at] == "[":
        values: list[Any] = []
        at += 1
        while tokens[at] != "]":
            if tokens[at] == ",":
                at += 1
                continue
            value, at = _parse_value(tokens, at)
            values.extend(value)
        return values, at + 1
    return [tokens[at].strip('"')], at + 1
