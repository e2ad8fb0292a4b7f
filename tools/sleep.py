"""Have a worker's engine give back its GPU, or its memory, and take it again.

    python tools/sleep.py decode                  # what runs ends or moves, then the engine ends
    python tools/sleep.py decode --free-weights   # what the memory service keeps for it goes, too; also while it sleeps
    python tools/sleep.py decode --wake
    python tools/sleep.py decode_1 --run-folder /run/user/1000/bireme-1000/4711-a1b2c3
    python tools/sleep.py decode_1 --admin http://10.1.0.5:8004 --admin-key-file admin.key     # from another host

Nothing new goes to a worker that sleeps; /health/ready and bireme_engine_asleep say that it does. It sleeps on when
its server is started again. For a user's only launch on this host, else --run-folder or --admin names one.

Exit codes: 0; 2 there is no such launch or worker, it does not sleep, or it is the last one (--force).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.discovery import run_folder
from bireme.errors import BiremeError, NotFoundError
from bireme.launch.admin_client import DoorClient, add_door_options, door_of
from bireme.launch.run_folder import only_launch

WRONG = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if (door := door_of(options)) is not None:
            _at_door(door, options)
            return 0
        folder = Path(options.run_folder) if options.run_folder else only_launch()
        if options.wake:
            if not run_folder.wake(folder, options.worker):
                raise NotFoundError(f"{options.worker} does not sleep in {folder}")
        elif not run_folder.must_sleep(folder, options.worker):
            worker = run_folder.find(folder, options.worker).worker
            run_folder.ask_sleep(folder, worker, free_weights=options.free_weights)
        elif options.free_weights:
            run_folder.ask_sleep(folder, options.worker, free_weights=True)
    except BiremeError as error:
        print(error, file=sys.stderr)
        return WRONG
    print(f"{options.worker} {'wakes' if options.wake else 'goes to sleep'} ({folder})")
    return 0


def _at_door(door: DoorClient, options: argparse.Namespace) -> None:
    if options.wake:
        door.post("/wake", worker=options.worker)
    else:
        door.post("/sleep", worker=options.worker, free_weights=options.free_weights, force=options.force)
    print(f"{options.worker} {'wakes' if options.wake else 'goes to sleep'} ({door.address})")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worker", help="a worker's Triton model: decode, decode_1, prefill, ...")
    parser.add_argument("--wake", action="store_true", help="start its engine again")
    parser.add_argument("--free-weights", action="store_true", help="let the memory service keep none for it")
    parser.add_argument("--force", action="store_true", help="even the last worker of a stage, at the door")
    parser.add_argument("--run-folder", metavar="FOLDER", help="of the launch; its log names it")
    add_door_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
