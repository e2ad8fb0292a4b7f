"""Tell what is under way in a launch, by its admin door, and change what can be changed while it runs.

    python tools/status.py --admin http://10.1.0.5:8004 --admin-key-file admin.key
    python tools/status.py --json
    python tools/status.py --log-level debug                     # of all its processes; --log-level as-started
    python tools/status.py --weight 0.3                          # of new requests to its generation; as-started
    python tools/status.py --busy '[{"max_kv_usage": 0.9}]'      # in place of router.busy; --busy null: as the recipe

Exit codes: 0 it can be ended without losing a request; 1 it can't, and the reasons; 2 nobody answers, or what was asked
is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.errors import BiremeError, ConfigError
from bireme.launch.admin_client import DoorClient, add_door_options, door_of
from bireme.launch.console import LEVELS

SAFE, UNSAFE, WRONG = 0, 1, 2
_AS_STARTED = "as-started"
_COUNTS = ("in_flight_requests", "leases", "transfers")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        door = door_of(options)
        if door is None:
            raise ConfigError("--admin: missing; name the launch's admin door (serve.py --admin-port)")
        _change(door, options)
        status = door.status()
    except BiremeError as error:
        print(error, file=sys.stderr)
        return WRONG
    print(json.dumps(status, indent=2) if options.json else _text(status))
    return SAFE if status["safe_to_delete"] else UNSAFE


def _change(door: DoorClient, options: argparse.Namespace) -> None:
    if options.log_level:
        door.post("/log-level", level=None if options.log_level == _AS_STARTED else options.log_level)
    if options.weight:
        try:
            weight = None if options.weight == _AS_STARTED else float(options.weight)
        except ValueError as error:
            raise ConfigError(f"--weight: {options.weight[:40]}; write a number of 0 to 1, or {_AS_STARTED}") from error
        door.post("/weight", weight=weight)
    if options.busy:
        try:
            rules = json.loads(options.busy)
        except ValueError as error:
            raise ConfigError(f"--busy: {error}; write JSON, a list of rules or null") from error
        door.post("/busy", rules=rules)


def _text(status: dict[str, Any]) -> str:
    under_way = ", ".join(f"{status[name]} {name.replace('_', ' ')}" for name in _COUNTS)
    of_generation = f"generation {status['generation']}, weight {status['weight']:g}"
    about = f"{status['recipe']}, bireme {status['version']}, {of_generation}"
    lines = [f"{status['model']} ({about}): {status['status']}", under_way]
    if len(status.get("shares", {})) > 1:
        shares = ", ".join(f"generation {one} {100 * share:g}%" for one, share in status["shares"].items())
        lines.append(f"of new requests: {shares}")
    width = max(map(len, status["workers"]), default=0)
    for name, one in status["workers"].items():
        counts = " ".join(f"{one[count]:5d} {count.replace('_', ' ')}" for count in _COUNTS)
        lines.append(f"  {name:{width}}  {counts}  {one['state']}")
    if status["live_settings"]:
        lines.append(f"changed while it runs: {json.dumps(status['live_settings'])}")
    return "\n".join([*lines, "safe to delete: " + ("yes" if status["safe_to_delete"] else "no"),
                      *(f"  {reason}" for reason in status["reasons"])])  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="all of it, as the door tells it")
    parser.add_argument("--log-level", choices=(*LEVELS, _AS_STARTED))
    parser.add_argument("--busy", metavar="JSON", help="rules as in router.busy, [] for none, null for the recipe's")
    parser.add_argument("--weight", metavar="SHARE", help=f"0 to 1, or {_AS_STARTED}")
    add_door_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
