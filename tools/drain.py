"""Take a worker of a running launch, or all of it, out of service without losing a request, or put it back.

    python tools/drain.py decode_1                      # nothing new goes there; what runs there ends
    python tools/drain.py decode_1 --undo
    python tools/drain.py decode_1 --run-folder /run/user/1000/bireme-1000/4711-a1b2c3
    python tools/drain.py decode_1 --admin http://10.1.0.5:8004 --admin-key-file admin.key       # from another host
    python tools/drain.py --all --wait 600 --admin http://127.0.0.1:8004 --admin-key-file admin.key    # a preStop hook

For a user's only launch on this host, else --run-folder or --admin names one. A drained worker stays so if its engine
is started again. --all is for a server that is to end: its readiness says no, others send it nothing new, what it
still gets it serves. --wait returns when nothing is under way any more.

Exit codes: 0; 1 --wait has passed; 2 there is no such launch or worker, or it is the last one (--force).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.discovery import run_folder
from bireme.errors import BiremeError, ConfigError
from bireme.launch.admin_client import DoorClient, add_door_options, door_of
from bireme.launch.run_folder import only_launch

DONE, BUSY, WRONG = 0, 1, 2
_LOOK_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if (door := door_of(options)) is not None:
            return _at_door(door, options)
        if options.all or options.wait is not None:
            raise ConfigError("--all and --wait ask the launch itself; name its admin door (--admin)")
        folder = Path(options.run_folder) if options.run_folder else only_launch()
        record = run_folder.find(folder, options.worker)
        run_folder.ask_drain(folder, record.worker, undo=options.undo)
    except BiremeError as error:
        print(error, file=sys.stderr)
        return WRONG
    print(f"{record.worker} {'takes requests again' if options.undo else 'drains'} ({folder})")
    return DONE


def _at_door(door: DoorClient, options: argparse.Namespace) -> int:
    worker = options.worker or ""
    if options.undo:
        door.post("/undrain", worker=worker)
        print(f"{worker or 'all'} takes requests again ({door.address})")
        return DONE
    door.post("/drain", worker=worker, force=options.force)
    print(f"{worker or 'all'} drains ({door.address})")
    return DONE if options.wait is None else _wait(door, worker, options.wait)


def _wait(door: DoorClient, worker: str, limit_s: float) -> int:
    deadline = time.monotonic() + limit_s
    while True:
        status = door.status()
        if worker:
            one = status["workers"][worker]
            left = [f"{count} {name}" for name, count in one.items() if name != "state" and count]
        else:
            left = status["reasons"]
        if not left:
            print(f"{worker or 'all'} has ended its requests")
            return DONE
        if time.monotonic() >= deadline:
            print(f"after {limit_s:g} s: {'; '.join(left)}", file=sys.stderr)
            return BUSY
        time.sleep(_LOOK_S)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worker", nargs="?", help="a worker's Triton model: decode, decode_1, prefill, ...")
    parser.add_argument("--all", action="store_true", help="the whole server")
    parser.add_argument("--undo", action="store_true", help="let it take requests again")
    parser.add_argument("--force", action="store_true", help="even the last worker of a stage, at the door")
    parser.add_argument("--wait", type=float, metavar="S", help="until nothing is under way, so many seconds at most")
    parser.add_argument("--run-folder", metavar="FOLDER", help="of the launch; its log names it")
    add_door_options(parser)
    options = parser.parse_args(arguments)
    if bool(options.worker) == options.all:
        parser.error("name a worker, or --all")
    return options


if __name__ == "__main__":
    sys.exit(main())
