"""Values as Python writes them, read from a syntax tree and never run."""

from __future__ import annotations

import ast
import warnings
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}  # as JSON writes them
_FAULTS = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)


def syntax_tree(text: str) -> ast.expr:
    """Return an expression's tree. Raises ValueError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in a model's strings
            return ast.parse(text.strip(), mode="eval").body
    except _FAULTS as error:
        raise ValueError("no expression") from error


def literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON knows. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            if _is_number(value := literal(operand)):
                return -value if isinstance(sign, ast.USub) else value
        case ast.Name(id="true" | "false" | "null" as name):
            return _NAMES[name]
    raise ValueError("no literal")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no text as key")
