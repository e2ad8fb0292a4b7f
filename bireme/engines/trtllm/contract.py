"""TensorRT-LLM's settings classes by release, read from contract.yaml, and the check of a YAML against them.

What the installed package would refuse when it is constructed, this refuses without it, on a machine without a GPU.
Every finding is reported, not only the first.

    problems = validate({"kv_cache_config": {"fraction": 0.5}}, "LlmArgs", "1.2.1")
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from bireme import yaml_text
from bireme.engines.trtllm.field_types import FieldType, parse_type
from bireme.engines.trtllm.problems import NOTHING, Path, Problem, show

VERSIONS = {"1.2": "1.2.1", "1.3": "1.3.0rc29", "1.4": "1.4.0rc1"}  # profile -> the release that it describes
PROFILES = tuple(VERSIONS)
FLOOR, CEILING = VERSIONS[PROFILES[0]], VERSIONS[PROFILES[-1]]
CONTRACT = FilePath(__file__).with_name("contract.yaml")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a settings class. `since` and `until` are releases such as 1.3; until is the first without it."""

    name: str
    type: FieldType
    default: Any
    since: str = ""
    until: str = ""
    deprecated: str = ""  # the first release that only tolerates it
    instead: str = "remove it"  # where it, or a value, is gone or deprecated
    gone_values: Mapping[str, str] | None = None  # value -> the first release without it
    required: bool = False
    status: str = "stable"
    alias: str = ""

    def exists_in(self, release: str) -> bool:
        return not (self.since and release < self.since) and not (self.until and release >= self.until)

    def is_deprecated_in(self, release: str) -> bool:
        return bool(self.deprecated) and release >= self.deprecated


@functools.cache
def contract() -> dict[str, Any]:
    """Return contract.yaml. Callers must not change it."""
    tree: dict[str, Any] = yaml_text.read(CONTRACT.read_text(encoding="utf-8"))
    return tree


def profile(version: str) -> str:
    """1.2.1 -> 1.2; an older or newer release gets the nearest profile."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match:
        raise ValueError(f"TensorRT-LLM version {version!r} is not a release number such as {FLOOR}")
    release = int(match.group(1)), int(match.group(2))
    older = [name for name in PROFILES if tuple(map(int, name.split("."))) <= release]
    return older[-1] if older else PROFILES[0]


def fields(class_name: str, version: str = FLOOR) -> dict[str, Field]:
    """Its base class's included, by name."""
    return {name: field for name, field in all_fields(class_name, profile(version)).items() if field is not None}


@functools.cache
def all_fields(class_name: str, release: str) -> dict[str, Field]:
    result = dict(all_fields(base, release)) if (base := _class(class_name).get("base")) else {}
    if class_name == "AutoDeployLlmArgs":
        result |= all_fields("LlmArgs", release)
    found = _declared(class_name, release)
    return result | {name: field for name, field in found.items() if field.exists_in(release)}


def _declared(class_name: str, release: str) -> dict[str, Field]:
    """Of any release."""
    entries = {name: entry for name, entry in _class(class_name).items() if isinstance(entry, list)}
    return {name: _field(name, entry, release) for name, entry in entries.items()}


def _field(name: str, entry: list[Any], release: str) -> Field:
    text, default, *rest = entry
    more = dict(rest[0]) if rest else {}
    required = more.pop("required", False) or release < more.pop("required_until", "")
    newer = {value for value, since in more.pop("values_since", {}).items() if release < since}
    gone = {value: until for value, until in more.pop("values_until", {}).items() if release >= until}
    for since, later in more.pop("defaults", {}).items():
        default = later if release >= since else default
    kind = parse_type("null" if text is None else text).without({*newer, *gone})
    return Field(name, kind, default, gone_values=gone, required=required, **more)


def _class(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = contract()["config_classes"][name]
    return entry


def validate(tree: Mapping[str, Any], class_name: str, version: str = FLOOR, path: Path = ()) -> list[Problem]:
    """Names, types, values, blocks inside; [] when it fits."""
    release = profile(version)
    if "discriminator" in _class(class_name):
        return list(_check_union(tree, class_name, release, path))
    return list(_check_class(tree, class_name, release, path))


def _check_class(tree: Mapping[str, Any], class_name: str, release: str, path: Path) -> Iterator[Problem]:
    known = all_fields(class_name, release)
    aliases = {field.alias: field for field in known.values() if field.alias}
    for name, value in tree.items():
        field = known.get(str(name)) or aliases.get(str(name))
        if field is None:
            yield from _unknown(str(name), value, class_name, release, path)
            continue
        if field.is_deprecated_in(release):
            reason = f"deprecated from TensorRT-LLM {field.deprecated} on"
            yield Problem((*path, str(name)), value, reason, field.instead, "warning")
        yield from _check_value(field, value, release, (*path, str(name)))
    for field in known.values():
        if field.required and not {field.name, field.alias} & tree.keys():
            yield Problem((*path, field.name), NOTHING, f"missing; {release} needs it", _how_to_fill(field))


def _check_union(tree: Mapping[str, Any], class_name: str, release: str, path: Path) -> Iterator[Problem]:
    union = _class(class_name)
    key = union["discriminator"]
    choices = choices_of(class_name, release)
    chosen = tree.get(key, NOTHING)
    if chosen is NOTHING:
        yield Problem((*path, key), NOTHING, "missing; it says which kind this is", f"set one of {_list(choices)}")
    elif chosen not in choices:
        reason = f"not a {key} of TensorRT-LLM {release}"
        yield Problem((*path, key), chosen, reason, _nearest(str(chosen), choices), is_by_release=True)
    else:
        yield from _check_class(tree, union["classes"][chosen], release, path)


def _has_choice(union: Mapping[str, Any], name: str, release: str) -> bool:
    since, until = union.get("since", {}).get(name, ""), union.get("until", {}).get(name, "")
    return not (since and release < since) and not (until and release >= until)


def classes_of(class_name: str, release: str) -> list[str]:
    """Of a union those that the release has."""
    if not class_name:
        return []
    union = _class(class_name)
    if "discriminator" not in union:
        return [class_name]
    return list(dict.fromkeys(name for key, name in union["classes"].items() if _has_choice(union, key, release)))


def discriminator(class_name: str) -> str | None:
    """None: the class is no union."""
    return _class(class_name).get("discriminator") if class_name else None


def choices_of(class_name: str, release: str) -> list[str]:
    union = _class(class_name)
    return [name for name in union["classes"] if _has_choice(union, name, release)]


def _check_value(field: Field, value: Any, release: str, path: Path) -> Iterator[Problem]:
    if not field.type.is_writable and value is not None:
        yield Problem(
            path, value, "TensorRT-LLM wants a Python object here, which YAML can't express", "remove the key"
        )
    elif not field.type.takes(value):
        yield _misfit(field, value, path)
    elif isinstance(value, Mapping) and field.type.class_name:
        yield from validate(value, field.type.class_name, release, path)


def _misfit(field: Field, value: Any, path: Path) -> Problem:
    wanted = field.type
    if field.gone_values and isinstance(value, str) and value in field.gone_values:
        reason, remedy = f"gone in TensorRT-LLM {field.gone_values[value]}", field.instead
        return Problem(path, value, reason, remedy, is_by_release=True)
    if wanted.values and isinstance(value, str):
        reason, remedy = f"one of {_list(wanted.values)} is expected", _nearest(value, wanted.values)
        return Problem(path, value, reason, remedy, is_by_release=True)
    reason = f"{wanted.describe()} is expected"
    if isinstance(value, str) and wanted.takes(_as_number(value)):
        remedy = "remove the quotes" if re.fullmatch(r"-?[\d.]+", value) else f"write {_as_number(value)!r}"
        return Problem(path, value, reason, remedy)
    return Problem(path, value, reason, _how_to_fill(field), is_by_release=wanted.is_out_of_range(value))


def _as_number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), NOTHING)


def _how_to_fill(field: Field) -> str:
    if field.type.values:
        return f"set one of {_list(field.type.values)}"
    if field.required:
        return f"set {field.type.describe()}" + ("" if field.default is None else f", such as {show(field.default)}")
    return (
        "leave it out for the default"
        if field.default in (None, "factory")
        else f"the default is {show(field.default)}"
    )


def _unknown(name: str, value: Any, class_name: str, release: str, path: Path) -> Iterator[Problem]:
    if _class(class_name).get("open"):
        return
    reason = f"TensorRT-LLM {release} has no such key in {class_name}"
    if (other := _elsewhere(name, class_name, release)) is not None:
        reason, remedy = other
    elif not path and (block := _block_with(name, release)):
        remedy = f"did you mean {block}.{name}?"
    else:
        remedy = _nearest(name, list(all_fields(class_name, release)))
    yield Problem((*path, name), value, reason, remedy, is_by_release=True)


def _elsewhere(name: str, class_name: str, release: str) -> tuple[str, str] | None:
    """That the class has in another release, or had under another name."""
    base = class_name
    while base:
        if (field := _declared(base, release).get(name)) is not None:
            return _in_other_releases(field, release)
        base = _class(base).get("base", "")
    if class_name in ("LlmArgs", "AutoDeployLlmArgs"):
        return (RETIRED_SINCE_1_3.get(name) if release >= "1.3" else None) or RETIRED.get(name)
    return None


def _in_other_releases(field: Field, release: str) -> tuple[str, str]:
    if field.since and field.since == field.until:
        return f"only early release candidates of TensorRT-LLM {field.since} had it", field.instead
    if field.since and release < field.since:
        return f"new in TensorRT-LLM {field.since}", "remove it, or set engine_version to the release that you run"
    return f"gone in TensorRT-LLM {field.until}", field.instead


# Keys of older releases, and options of trtllm-serve that look like keys: the reason, and the remedy.
_OLD = "a key of older releases"
RETIRED: dict[str, tuple[str, str]] = {
    "build_config": ("the PyTorch backend builds no engine", "move its limits to the top level"),
    "decoding_config": (_OLD, "use speculative_config"),
    "enable_trtllm_sampler": ("removed in 1.2", "set sampler_type: TRTLLMSampler"),
    "enable_mixed_sampler": ("removed in 1.2", "set sampler_type: TorchSampler"),
    "enable_overlap_scheduler": ("the overlap scheduler is on by default", "use disable_overlap_scheduler"),
    "quant_config": (
        "the PyTorch backend reads it, and which modules are plain, from the checkpoint",
        "remove it, and serve a quantized checkpoint (hf_quant_config.json, or quantization_config in config.json)",
    ),
    "pytorch_backend_config": ("its keys stand at the top level now", "move them there"),
    "use_cuda_graph": (_OLD, "set cuda_graph_config: {}, or null to switch CUDA graphs off"),
    "cuda_graph_batch_sizes": (_OLD, "set cuda_graph_config.batch_sizes"),
    "cuda_graph_padding_enabled": (_OLD, "set cuda_graph_config.enable_padding"),
    "moe_backend": (_OLD, "set moe_config.backend"),
    "moe_max_num_tokens": (_OLD, "set moe_config.max_num_tokens"),
    "moe_load_balancer": (_OLD, "set moe_config.load_balancer"),
}
RETIRED_SINCE_1_3 = {"enable_trtllm_sampler": ("1.3 has no such sampler any more", "remove it")}


def _block_with(name: str, release: str) -> str:
    """ "" where none or several have the field."""
    blocks = {key: field.type.class_name for key, field in all_fields("LlmArgs", release).items()}
    plain = {key: name_ for key, name_ in blocks.items() if name_ and "discriminator" not in _class(name_)}
    found = [key for key, class_name in plain.items() if name in all_fields(class_name, release)]
    return found[0] if len(found) == 1 else ""


def _nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1) or [name for name in by_lower if word.lower() in name]
    if near:
        return f"did you mean {by_lower[near[0]]}?"
    return f"known: {_list(known)}" if len(known) <= 12 else "remove it"


def _list(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names)
