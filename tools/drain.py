"""Take a worker of a running launch out of service without losing a request, or put it back.

    python tools/drain.py decode_1                      # nothing new goes there; what runs there ends
    python tools/drain.py decode_1 --undo
    python tools/drain.py decode_1 --run-folder /run/user/1000/bireme-1000/4711-a1b2c3

For a user's only launch on this host, else --run-folder names one. A drained worker stays so if its engine is started
again. To drain a whole server, send SIGTERM to its serve.py.

Exit codes: 0; 2 there is no such launch or worker.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.discovery import run_folder
from bireme.errors import BiremeError
from bireme.launch.run_folder import only_launch

WRONG = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        folder = Path(options.run_folder) if options.run_folder else only_launch()
        record = run_folder.find(folder, options.worker)
    except BiremeError as error:
        print(error, file=sys.stderr)
        return WRONG
    run_folder.ask_drain(folder, record.worker, undo=options.undo)
    print(f"{record.worker} {'takes requests again' if options.undo else 'drains'} ({folder})")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worker", help="a worker's Triton model: decode, decode_1, prefill, ...")
    parser.add_argument("--undo", action="store_true", help="let it take requests again")
    parser.add_argument("--run-folder", metavar="FOLDER", help="of the launch; its log names it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
