"""What the settings of the installed TensorRT-LLM are, held against bireme's contract of its release.

    python tools/describe_trtllm.py                        # what the contract lacks, has too much, or has otherwise
    python tools/describe_trtllm.py --paths                # every setting: dotted path, and the words that it takes
    python tools/describe_trtllm.py --contract             # what the contract lacks, as contract.yaml writes it
    python tools/describe_trtllm.py --manifest FILE        # of a source checkout, without the package

Read are the package's own classes (pydantic). Where they can't be imported, its field manifest is:
`tensorrt_llm/usage/llm_args_golden_manifest.json`, which sources have and wheels do not, and which lists no free texts
and no mappings. A setting that is new here is no fault: an engine passes it on with a warning.

Exit codes: 0 contract and package agree; 1 they differ; 2 there is neither package nor manifest.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import importlib.util
import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.engines.trtllm import contract

AGREE, DIFFER, NOTHING_THERE = 0, 1, 2
MANIFEST = Path("usage") / "llm_args_golden_manifest.json"
_INTERNAL = frozenset({"mpi_session", "model"})  # the one is no setting, the other the recipe's
Rows = dict[str, frozenset[str]]  # dotted path -> the words that it takes


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    classes = None if options.manifest else args_class()
    manifest = options.manifest or manifest_of_package()
    if classes is None and manifest is None:
        print("no tensorrt_llm here; run this in the engine's Python, or give --manifest", file=sys.stderr)
        return NOTHING_THERE
    found = rows_of_class(classes) if classes is not None else rows_of_manifest(manifest)
    if options.paths:
        print("\n".join(" ".join((path, *sorted(words))) for path, words in sorted(found.items())))
        return AGREE
    release = contract.profile(options.release or version() or contract.CEILING)
    if options.contract:
        print("\n".join(entries(classes, found.keys() - rows_of_contract(release).keys(), release)))
        return AGREE
    lines = differences(found, release, is_whole=classes is not None)
    print("\n".join([*lines, f"{len(lines)} difference(s) from the contract of {release}"]))
    return DIFFER if lines else AGREE


def parse(arguments: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", action="store_true", help="list every setting")
    parser.add_argument("--contract", action="store_true", help="print what is new as contract.yaml writes it")
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="a field manifest instead of the package")
    parser.add_argument("--release", metavar="1.4", help="the contract's release; default: that of the package")
    return parser.parse_args(arguments)


def version() -> str:
    try:
        return str(importlib.import_module("tensorrt_llm").__version__)
    except ImportError:
        return ""


def args_class() -> Any | None:
    """Return TorchLlmArgs, or None: no package, or one that can't be imported here."""
    try:
        return importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        print(f"tensorrt_llm can't be imported: {error}", file=sys.stderr)
        return None


def manifest_of_package() -> Path | None:
    spec = importlib.util.find_spec("tensorrt_llm")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((path for folder in folders or () if (path := Path(folder) / MANIFEST).is_file()), None)


def differences(found: Rows, release: str, *, is_whole: bool) -> list[str]:
    """Return a line each; what only the contract has counts where the package was seen whole."""
    known = rows_of_contract(release)
    lines = [f"new    {path}" for path in sorted(found.keys() - known.keys())]
    if is_whole:
        lines += [f"gone   {path}" for path in sorted(known.keys() - found.keys())]
    for path in sorted(found.keys() & known.keys()):
        more, less = found[path] - known[path], known[path] - found[path]
        if more and known[path]:  # a contract that names no words takes any
            lines.append(f"words  {path} takes {' '.join(sorted(more))}, too")
        if less and found[path] and is_whole:
            lines.append(f"words  {path} takes no {' '.join(sorted(less))}")
    return lines


def rows_of_manifest(path: Path) -> Rows:
    entries = json.loads(path.read_text(encoding="utf-8"))["TorchLlmArgs"]
    return {entry["path"]: frozenset(map(str, entry["allowed_values"])) for entry in entries}


def rows_of_class(kind: Any, prefix: str = "") -> Rows:
    """Return the leaves below a pydantic class; those of a union's classes together."""
    rows: Rows = {}
    for name, field in kind.model_fields.items():
        path = f"{prefix}{name}"
        if path in _INTERNAL:
            continue
        below = [part for part in parts_of(field.annotation) if hasattr(part, "model_fields")]
        for one in below:
            for inner, words in rows_of_class(one, f"{path}.").items():
                rows[inner] = rows.get(inner, frozenset()) | words
        if not below:
            rows[path] = frozenset(words_of(field.annotation))
    return rows


def parts_of(annotation: Any) -> Iterator[Any]:
    """Yield what an annotation is made of: alternatives, items of lists, what is Annotated."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated or origin in (typing.Union, types.UnionType, list, set, tuple):
        inner = typing.get_args(annotation)
        for part in inner[:1] if origin is typing.Annotated else inner:
            yield from parts_of(part)
    else:
        yield annotation


def words_of(annotation: Any) -> Iterator[str]:
    for part in parts_of(annotation):
        if typing.get_origin(part) is typing.Literal:
            yield from map(str, typing.get_args(part))
        elif isinstance(part, type) and issubclass(part, enum.Enum):
            yield from (one.value if isinstance(one.value, str) else one.name for one in part)


def rows_of_contract(release: str, class_name: str = "LlmArgs", prefix: str = "") -> Rows:
    rows: Rows = {}
    for name, field in contract.all_fields(class_name, release).items():
        path = f"{prefix}{name}"
        below = contract.classes_of(field.type.class_name, release)
        for one in below:
            for inner, words in rows_of_contract(release, one, f"{path}.").items():
                rows[inner] = rows.get(inner, frozenset()) | words
        if (key := contract.discriminator(field.type.class_name)) is not None:
            rows[f"{path}.{key}"] = frozenset(contract.choices_of(field.type.class_name, release))
            if release < "1.3":  # a class variable there
                del rows[f"{path}.{key}"]
        if not below and path not in _INTERNAL:
            rows[path] = frozenset(field.type.words)
    return rows


def entries(kind: Any, wanted: set[str], release: str) -> Iterator[str]:
    """Yield contract.yaml's lines for settings that it lacks, below the name of their class."""
    for path in sorted(wanted):
        field, owner = _field_at(kind, path.split(".")) if kind is not None else (None, "")
        name = path.rpartition(".")[2]
        if field is None:
            yield f"  # {path}: of a manifest, which tells no type"
            continue
        kind_of, is_required = notation(field.annotation, field.metadata), field.is_required()
        default = "null" if is_required else _as_yaml(field.get_default(call_default_factory=False))
        more = f'{{since: "{release}"{", required: true" if is_required else ""}}}'
        yield f'  {owner}:\n    {name}: ["{kind_of}", {default}, {more}]'


def _field_at(kind: Any, path: list[str]) -> tuple[Any, str]:
    name, *rest = path
    field = kind.model_fields.get(name)
    if not rest or field is None:
        return field, kind.__name__.replace("TorchLlmArgs", "LlmArgs")
    inner = [one for one in parts_of(field.annotation) if hasattr(one, "model_fields") and rest[0] in one.model_fields]
    return _field_at(inner[0], rest) if inner else (None, "")


def notation(annotation: Any, metadata: Any = ()) -> str:
    """Return a type as contract.yaml writes it."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return notation(inner[0], inner[1:])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(notation(part, metadata) for part in inner)
    if origin is typing.Literal:
        return " | ".join("null" if value is None else str(value) for value in inner)
    if origin in (list, set, tuple):
        return f"list[{notation(inner[0])}]" if inner else "any"
    if origin is dict or annotation is dict:
        return "dict"
    if annotation in (int, float):
        return annotation.__name__ + _bounds(annotation, metadata)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " | ".join(words_of(annotation))
    if hasattr(annotation, "model_fields"):
        return str(annotation.__name__)
    return {type(None): "null", bool: "bool", str: "str", Path: "str"}.get(annotation, "any")


def _bounds(kind: type, metadata: Any) -> str:
    flat = [part for one in metadata for part in (getattr(one, "metadata", None) or [one])]
    low = next((value for one in flat if (value := getattr(one, "ge", None)) is not None), None)
    above = next((value for one in flat if (value := getattr(one, "gt", None)) is not None), None)
    high = next((value for one in flat if (value := getattr(one, "le", None)) is not None), None)
    least = low if low is not None or above is None else above + 1 if kind is int else above  # bounds are inclusive
    if least is None:
        return ""
    return f" {least:g}..{high:g}" if high is not None else f" >= {least:g}"


def _as_yaml(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if value is None or isinstance(value, bool | int | float | list | Mapping):
        return json.dumps(value)
    return value if isinstance(value, str) and re.fullmatch(r"[\w-]+", value) else "factory"


if __name__ == "__main__":
    sys.exit(main())
