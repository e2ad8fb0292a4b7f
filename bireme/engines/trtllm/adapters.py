"""LoRA adapters that requests may name: the folders of `lora_config.lora_dir`, by their folder names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bireme.errors import ConfigError


class Adapters:
    """Numbered from 1 in the order of the list, so that an adapter has the same number in every worker."""

    def __init__(self, folders: Sequence[str], lora_request: Any) -> None:
        self._paths: dict[str, tuple[int, str]] = {}
        self._request = lora_request
        for number, folder in enumerate(folders, 1):
            name = Path(folder).name
            if name in self._paths:
                raise ConfigError(f"lora_config.lora_dir: two folders are named {name}; requests name adapters by it")
            if not Path(folder).is_dir():  # LoRARequest would refuse each request that names it
                raise ConfigError(f"lora_config.lora_dir: {folder} is no folder; give the adapter's, or remove it")
            self._paths[name] = (number, folder)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._paths)

    def request(self, name: str) -> Any:
        number, folder = self._paths[name]
        return self._request(name, number, folder)
