"""What an operator has changed while a launch runs: a file of its run folder that each process follows by `look`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from bireme import private_files
from bireme.config import BusyRule
from bireme.messages import MALFORMED

FILE_NAME = "live.json"
LogLevel = Literal["debug", "info", "warning", "error"]
_NEVER = (0, 0)
logger = logging.getLogger("bireme.discovery")


class MirrorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the frontend sends copies of requests, and of how many."""

    url: str  # http[s]://host:port of another launch's frontend
    share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    key_file: str = ""  # with the API key to show there; clients' own keys are never sent on
    ca_file: str = ""  # authority of its certificate; "": the host's own
    generation: int | None = None  # whose workers are to answer; None: as the routers there choose
    run: str = ""  # tells one comparison from the one before


class LiveSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """None: as options and recipe say."""

    log_level: LogLevel | None = None
    busy: tuple[BusyRule, ...] | None = None  # in place of router.busy; (): no worker is ever busy
    weight: float | None = None  # in place of --weight
    mirror: MirrorSettings | None = None


class _Followed:
    """The file as this process knows it."""

    def __init__(self) -> None:
        self.settings = LiveSettings()
        self.seen = _NEVER  # inode and modification time of what was read
        self.own_level: int | None = None  # the log level before an operator changed it


_followed = _Followed()


def current() -> LiveSettings:
    return _followed.settings


def weight(as_started: float) -> float:
    """Return the share of new requests that this launch's generation gets now."""
    live = _followed.settings.weight
    return as_started if live is None else live


def write(folder: Path, settings: LiveSettings) -> None:
    private_files.replace_file(folder / FILE_NAME, msgspec.json.encode(settings))


def look(folder: Path) -> None:
    """Take what has changed; one that can't be read changes nothing."""
    try:
        status = (folder / FILE_NAME).stat()
        seen = status.st_ino, status.st_mtime_ns
    except OSError:
        seen = _NEVER
    if seen == _followed.seen:
        return
    try:
        settings = LiveSettings()
        if seen != _NEVER:
            with private_files.open_regular(folder / FILE_NAME) as file:
                settings = msgspec.json.decode(file.read(), type=LiveSettings)
    except (OSError, *MALFORMED) as error:
        logger.warning("live_settings_unread error=%s", error)
        return
    finally:
        _followed.seen = seen
    _followed.settings = settings
    _set_level(settings.log_level)


def _set_level(level: LogLevel | None) -> None:
    ours = logging.getLogger("bireme")
    if _followed.own_level is None:
        if level is None:
            return
        _followed.own_level = ours.level
    ours.setLevel(level.upper() if level is not None else _followed.own_level)
    logger.info("log_level level=%s", logging.getLevelName(ours.getEffectiveLevel()).lower())
