"""Values as Python writes them, read from a syntax tree and never run."""

from __future__ import annotations

import ast
import warnings
from typing import Any

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
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = literal(node.operand)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no text as key")
