"""YAML by libyaml, which takes a seventh of the CPU. What it refuses PyYAML's own reader tells, with the line's text.

Where PyYAML was built without libyaml it reads and writes by itself.
"""

from __future__ import annotations

from typing import Any, TextIO

import yaml

_Fast: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_REFUSED = (yaml.YAMLError, ValueError, RecursionError)  # ValueError: what looks like a date and is none


def read(text: str) -> Any:
    """Return a document's tree. Raises yaml.YAMLError, ValueError and RecursionError."""
    try:
        return _Fast(text).get_single_data()
    except _REFUSED:
        return yaml.safe_load(text)


def compose(stream: TextIO) -> yaml.Node | None:
    """Return a document's nodes, with their places. Raises as `read`; errors name the stream's file."""
    try:
        root: yaml.Node | None = _Fast(stream).get_single_node()
    except _REFUSED:
        stream.seek(0)
        root = yaml.compose(stream, Loader=yaml.SafeLoader)
    return root


def write(tree: Any) -> str:
    """Return a document with keys in the tree's order."""
    options: dict[str, Any] = {"sort_keys": False, "width": 120, "allow_unicode": True}
    try:
        text: str = yaml.dump(tree, Dumper=_Dumper, **options)
    except UnicodeEncodeError:  # of bytes that are no UTF-8, as a variable or a path may have: PyYAML escapes them
        text = yaml.dump(tree, Dumper=yaml.SafeDumper, **options)
    return text
