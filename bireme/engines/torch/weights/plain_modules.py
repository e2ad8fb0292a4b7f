"""Which projections of a decoder's layers are plain beside others in few bits, by name. Needs no torch.

A recipe names them in `quant_config.exclude_modules`, a checkpoint in lists of its method. Where files are read, their
heads decide. Lists say it of weights that are made up, and of what is counted before.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import regex

from bireme.engines.torch.weights.kept_types import LAYER
from bireme.settings import NO_QUANT

KEY = "quant_config.exclude_modules"
_REGEX, _REGEX_S = "re:", 0.1  # for a name: an expression that goes back and forth for longer matches none
_MOST_REPEATS = 10_000  # that an expression counts: memory is taken for each
_BESIDE = ("lm_head", "model.embed_tokens")  # that are plain in any case: lists name them, too
# Of compressed-tensors and ModelOpt; of ModelOpt's older file; of transformers and AutoAWQ.
_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert")
_LEFT_OUT = "-:"  # what GPTQModel's `dynamic` has before a pattern of modules that it leaves out


def matrices_of(num_layers: int) -> list[list[str]]:
    """Return the names of all projections; those in one list are one matrix for the decoders here."""
    return [[f"model.layers.{layer}.{name}" for name in names] for layer in range(num_layers) for names in LAYER]


def plain_among(num_layers: int, is_plain: Callable[[str], bool]) -> frozenset[str]:
    """Return the projections of all matrices of which a part is plain. `is_plain`: is asked of each name."""
    return frozenset(name for own in matrices_of(num_layers) if any(map(is_plain, own)) for name in own)


def excluded(patterns: Sequence[str], num_layers: int) -> frozenset[str]:
    """Return the projections that a recipe leaves plain, by the rule of TensorRT-LLM's QuantConfig.

    A pattern is a module's name or that of one around it, with * and ? for anything, or `re:` and a regular expression
    for all of it.
    """
    names = [name for matrix in matrices_of(num_layers) for name in matrix]
    return frozenset(name for name in names if any(_is_within(name, pattern) for pattern in patterns))


def why_not_excluded(
    patterns: Sequence[str], algo: str | None, is_quantized: bool, num_layers: int
) -> tuple[str, str] | None:
    """Return which of a recipe's patterns can't be honored, and why, with the remedy; None: all can.

    `algo`: its quant_config.quant_algo. `is_quantized`: the checkpoint.
    """
    if not patterns:
        return None
    if algo in (None, "", NO_QUANT):
        return patterns[0], "without quant_config.quant_algo no weight is rounded; set it, or remove this"
    if is_quantized:
        return patterns[0], "the checkpoint is quantized already, and says itself what is plain; remove this"
    return _unknown(patterns, num_layers) or _part_of_matrix(patterns, num_layers)


def _unknown(patterns: Sequence[str], num_layers: int) -> tuple[str, str] | None:
    known = {own for matrix in matrices_of(num_layers) for name in matrix for own in _names_around(name)} | {*_BESIDE}
    for pattern in patterns:
        if any(_matches(pattern, name) for name in known):
            continue
        names = "names are as model.layers.0.mlp.up_proj"
        if pattern.startswith(_REGEX):
            why = f"is wrong, repeats more than {_MOST_REPEATS:,} times or takes over {_REGEX_S:g} s for a name"
            return pattern, f"it matches no module of the model's layers, or {why}; {names}, and all of one is matched"
        return pattern, f"no module of the model's layers is named so; {names}, and * stands for anything"
    return None


def _part_of_matrix(patterns: Sequence[str], num_layers: int) -> tuple[str, str] | None:
    found, matrices = excluded(patterns, num_layers), matrices_of(num_layers)
    if len(found) == sum(map(len, matrices)):
        return patterns[0], "nothing is left to round; remove this and quant_config.quant_algo"
    for matrix in matrices:
        plain = [name for name in matrix if name in found]
        if 0 < len(plain) < len(matrix):
            others = " and ".join(name for name in matrix if name not in found)
            pattern = next(one for one in patterns if _is_within(plain[0], one))
            return pattern, f"{plain[0]} is one matrix here with {others}; name all of these, or none"
    return None


def named_plain(told: Mapping[str, Any], num_layers: int) -> frozenset[str]:
    """Return the projections that a `quantization_config` has plain, and those that are one matrix with them."""
    patterns = [str(one) for key in _LISTS if isinstance(found := told.get(key), list) for one in found]
    dynamic = told.get("dynamic")
    if isinstance(dynamic, Mapping):
        left_out = [str(one).removeprefix(_LEFT_OUT) for one in dynamic if str(one).startswith(_LEFT_OUT)]
        patterns += [f"{_REGEX}{one}.*" for one in left_out]
    return plain_among(num_layers, lambda name: any(_is_within(name, one) or _is_run(name, one) for one in patterns))


def _is_within(name: str, pattern: str) -> bool:
    return any(_matches(pattern, own) for own in _names_around(name))


def _names_around(name: str) -> Iterator[str]:
    """Yield a module's name and those of the ones that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith(_REGEX):
        return fnmatchcase(name, pattern)
    return _expression(pattern.removeprefix(_REGEX))(name)


@functools.lru_cache(maxsize=256)
def _expression(source: str) -> Callable[[str], bool]:
    """Return what tells whether an expression matches; one that is wrong or takes too long matches nothing more."""
    found: list[Any] = []
    try:
        if _num_repeats(source) <= _MOST_REPEATS:
            found.append(regex.compile(source))
    except (regex.error, ValueError, RecursionError):  # wrong; flags or a number that can't be; too deep
        pass

    def matches(name: str) -> bool:
        try:
            return any(one.fullmatch(name, timeout=_REGEX_S) is not None for one in found)
        except TimeoutError:
            found.clear()
            return False

    return matches


def _num_repeats(source: str) -> int:
    """Return how often the innermost part would be repeated if all that an expression counts were in each other."""
    counts = [map(int, re.findall(r"[0-9]+", own)) for own in re.findall(r"\{([^}]*)\}", source)]
    return math.prod(max((1, *own)) for own in counts)


def _is_run(name: str, part: str) -> bool:
    """Return whether `part` is the end of a name or stands between its dots, as transformers reads its own list."""
    return f".{part}." in f".{name}."
