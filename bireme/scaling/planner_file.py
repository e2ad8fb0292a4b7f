"""A planner's settings as a YAML file, which is looked at again before each decision."""

from __future__ import annotations

from pathlib import Path

import yaml

from bireme import yaml_text
from bireme.conversion import convert
from bireme.errors import ConfigError
from bireme.planner.planner_settings import PlannerSettings

_NEVER = (0, 0)


class PlannerFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = _NEVER  # inode and modification time of what was read

    def changed(self) -> PlannerSettings | None:
        """Return what it has if it is another than at the last call. Raises ConfigError, once for each change."""
        try:
            status = self._path.stat()
            seen = status.st_ino, status.st_mtime_ns
            if seen == self._seen:
                return None
            self._seen = seen
            tree = yaml_text.read(self._path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{self._path}: it can't be read ({error})") from error
        settings = convert(tree if tree is not None else {}, PlannerSettings, str(self._path))
        settings.check()
        return settings
