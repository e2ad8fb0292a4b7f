"""config.json as what sizes are counted from: each number is within bounds, or the error names key and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bireme.errors import ConfigError

MOST_LAYERS = 10_000
_MOST = 1 << 32  # of any width, length or count
_MODELOPT = "hf_quant_config.json"
_MOST_BYTES = 16 << 20  # of config.json
_MOST_SHOWN = 60


class UncountedError(ConfigError):
    """The size can't be counted, which says nothing against the model."""


class ConfigFields:
    """One level of config.json. All methods raise ConfigError, UncountedError for a key that is missing."""

    def __init__(self, tree: Mapping[str, Any], where: str = "config.json") -> None:
        self.tree, self.where = tree, where

    def __contains__(self, key: str) -> bool:
        return self.tree.get(key) is not None

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """Return the number that stands under the first of these keys, else `default`."""
        for key in keys:
            value = self.tree.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{self.where}: {key}: {_shown(value)} is not a whole number")
            if not least <= value <= most:
                raise ConfigError(f"{self.where}: {key}: {_shown(value)}; {least} to {most} are possible")
            return value
        if default is None:
            raise UncountedError(f"{self.where}: {keys[0]} is missing, so the model's size is not counted")
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self.tree.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key}: {_shown(value)} is not true or false")
        return value

    def block(self, key: str) -> ConfigFields | None:
        """Return the object that stands there; None: there is none."""
        value = self.tree.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key}: {_shown(value)} is not an object")
        return ConfigFields(value, f"{self.where}: {key}")

    def kinds(self, key: str, count: int) -> list[str] | None:
        """Return a list of words, one for each of `count` layers; None: there is none."""
        value = self.tree.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
            raise ConfigError(f"{self.where}: {key}: {_shown(value)} is not a list of words")
        if len(value) != count:
            raise ConfigError(f"{self.where}: {key} has {len(value)} entries for {count} layers")
        return value

    def indices(self, key: str) -> set[int]:
        value = self.tree.get(key) or []
        if not isinstance(value, list) or not all(type(index) is int for index in value):
            raise ConfigError(f"{self.where}: {key}: {_shown(value)} is not a list of layers")
        return set(value)

    @property
    def architecture(self) -> str:
        """Return the class that config.json names; "": it names none."""
        names = self.tree.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    @property
    def dtype(self) -> str | None:
        value = self.tree.get("dtype") or self.tree.get("torch_dtype")
        return str(value).removeprefix("torch.") if value else None


def read_config(folder: Path) -> ConfigFields:
    """Return config.json, with the quantization that ModelOpt's older exports tell in a file of their own.

    Raises ConfigError.
    """
    tree, own = _read_tree(folder / "config.json"), folder / _MODELOPT
    if tree.get("quantization_config") is None and own.exists():
        told = ConfigFields(_read_tree(own), _MODELOPT).block("quantization")
        tree["quantization_config"] = {"quant_method": "modelopt"} | ({} if told is None else dict(told.tree))
    return ConfigFields(tree)


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes; a model's configuration has {_MOST_BYTES} at most")
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; it says how large the model is") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a JSON object is expected, not {type(tree).__name__}")
    return tree


def _shown(value: Any) -> str:
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < 10**_MOST_SHOWN
        else f"a number above 10^{_MOST_SHOWN}"
    )
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
