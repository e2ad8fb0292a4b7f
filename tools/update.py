"""Replace a running launch by another one, by their admin doors: compare, go on step by step, or fall back.

    python tools/update.py --old http://127.0.0.1:8004 --new http://127.0.0.1:8104 --admin-key-file admin.key
    python tools/update.py --old ... --new ... --start "python tools/serve.py recipes/tiny-chat --generation 2 ..."
    python tools/update.py --old ... --new ... --back        # from anywhere: the old one takes everything again

The new launch is held back (it drains) until it is ready. Copies of requests go from the old one's frontend to the new
one's, and answers are compared. Where both share a discovery, weights move requests, else whole entries: the old one
drains, so balancers leave it. At any failure, and at Ctrl-C, the old one takes everything again.

Exit codes: 0 the new one serves, and the old one may be ended; 1 the new one was not taken, and why; 2 a door does
not answer, or what was asked is wrong; 3 the new one serves, and the old one is still at work.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.errors import BiremeError, ConfigError
from bireme.launch.admin_client import KEY_VARIABLE, DoorClient
from bireme.launch.rolling_update import NotTakenError, RollingUpdate, UpdatePlan

TAKEN, NOT_TAKEN, WRONG, BUSY = 0, 1, 2, 3
_END_S = 60


class NewLaunch:
    """What --start has started."""

    def __init__(self, command: str, log: Path) -> None:
        """Raises ConfigError."""
        self._log = log
        try:
            with log.open("wb") as stream:
                self._process = subprocess.Popen(
                    shlex.split(command), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
                )
        except (OSError, ValueError) as error:
            raise ConfigError(f"--start: {command[:100]}: it can't be run ({error})") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises NotTakenError once it has ended."""
        if (code := self._process.poll()) is not None:
            last = self._log.read_text(errors="replace").splitlines()[-1:] or ["nothing"]
            raise NotTakenError(f"the new generation has ended with {code}: {last[0][:300]} ({self._log})")

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    result: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        old, new = (_door(options, address) for address in (options.old, options.new))
        plan = _plan(options)
        if options.back:
            return _go_back(RollingUpdate(old, new, plan, _tell), result, "as asked")
        if options.mirror and not options.entry:
            raise ConfigError(
                "--entry: missing; name the new launch's OpenAI frontend, or --mirror 0 to compare nothing"
            )
        return _update(options, old, new, plan, result)
    except BiremeError as error:
        result |= {"taken": False, "reason": str(error)}
        _tell(str(error))
        return WRONG
    finally:
        if options.json:
            print(json.dumps(result))


def _update(
    options: argparse.Namespace, old: DoorClient, new: DoorClient, plan: UpdatePlan, result: dict[str, Any]
) -> int:
    old.status()
    started = NewLaunch(options.start, Path(options.log)) if options.start else None
    update = RollingUpdate(old, new, plan, _tell, started.check if started else lambda: None)
    try:
        result |= update.run()
    except (BiremeError, KeyboardInterrupt) as error:
        code = _go_back(update, result, str(error) or "it was interrupted")
        if started is not None:
            started.end()
        return code
    if started is not None:
        result["pid"] = started.pid
    if result["is_old_safe"]:
        _tell("the new generation serves, and the old one may be ended")
        return TAKEN
    _tell(f"the new generation serves, and the old one is still at work: {'; '.join(result['left'])}")
    return BUSY


def _go_back(update: RollingUpdate, result: dict[str, Any], reason: str) -> int:
    problems = update.go_back()
    result |= {"taken": False, "reason": reason, "problems": problems}
    _tell(f"not taken: {reason}")
    for problem in problems:
        _tell(f"could not be taken back: {problem}")
    _tell("the old generation takes all requests" if not problems else "see above; --back does it again")
    return NOT_TAKEN


def _door(options: argparse.Namespace, address: str) -> DoorClient:
    """Raises ConfigError."""
    key, file = os.environ.get(KEY_VARIABLE, ""), options.admin_key_file
    if address == options.new and options.new_admin_key_file:
        file = options.new_admin_key_file
    if file:
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--admin-key-file {file}: it can't be read ({error})") from error
    return DoorClient(address, key, options.admin_ca)


def _plan(options: argparse.Namespace) -> UpdatePlan:
    """Raises ConfigError."""
    try:
        steps = tuple(float(step) for step in options.steps.split(","))
    except ValueError as error:
        raise ConfigError(f"--steps: {options.steps[:60]}; write weights up to 1, such as 0.1,0.5,1") from error
    if list(steps) != sorted(steps) or not 0 < steps[0] or steps[-1] != 1:
        raise ConfigError(f"--steps: {options.steps[:60]}; weights grow from above 0, and the last one is 1")
    if not 0 <= options.mirror <= 1:
        raise ConfigError(f"--mirror: {options.mirror:g}; 0 (nothing is compared) to 1")
    if options.min_compared < 1:
        raise ConfigError(f"--min-compared: {options.min_compared}; at least 1, or --mirror 0")
    return UpdatePlan(
        mirror_url=options.entry if options.mirror else "", mirror_key_file=options.entry_key_file,
        mirror_ca_file=options.entry_ca,
        share=options.mirror, min_compared=options.min_compared, max_different=options.max_different,
        max_failed=options.max_failed, max_ttft_ratio=options.max_ttft_ratio, steps=steps, pause_s=options.pause,
        ready_limit_s=options.ready_limit, mirror_limit_s=options.mirror_limit, drain_limit_s=options.drain_limit,
    )  # fmt: skip


def _tell(text: str) -> None:
    print(f"update: {text}", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, metavar="URL", help="admin door of the launch that serves")
    parser.add_argument("--new", required=True, metavar="URL", help="admin door of the one that is to serve")
    parser.add_argument("--admin-key-file", metavar="FILE", help=f"key of both doors; default ${KEY_VARIABLE}")
    parser.add_argument("--new-admin-key-file", metavar="FILE", help="key of the new one's, where it has its own")
    parser.add_argument("--admin-ca", default="", metavar="FILE", help="authority of the doors' certificates")
    parser.add_argument(
        "--start", metavar="COMMAND", help="that serves the new generation; it goes on after the update"
    )
    parser.add_argument("--log", default="update.log", metavar="FILE", help="of --start's output")
    parser.add_argument("--back", action="store_true", help="have the old one take everything again, and no more")
    parser.add_argument("--mirror", type=float, default=0.2, metavar="SHARE", help="of requests to copy; 0: none")
    parser.add_argument(
        "--entry", default="", metavar="URL", help="the new launch's OpenAI frontend, as the old one's host reaches it"
    )
    parser.add_argument("--entry-key-file", default="", metavar="FILE", help="its API key, on the old one's host")
    parser.add_argument("--entry-ca", default="", metavar="FILE", help="authority of its certificate, on that host")
    parser.add_argument("--min-compared", type=int, default=50, metavar="N", help="answers that must be compared")
    parser.add_argument("--max-different", type=float, default=0.0, metavar="SHARE", help="of them that may differ")
    parser.add_argument("--max-failed", type=float, default=0.01, metavar="SHARE", help="of copies and requests")
    parser.add_argument("--max-ttft-ratio", type=float, default=1.5, help="p90 of first tokens, new to old")
    parser.add_argument("--steps", default="0.1,0.5,1", help="weights, where both share a discovery")
    parser.add_argument("--pause", type=float, default=30.0, metavar="S", help="after each step, and watched")
    parser.add_argument("--ready-limit", type=float, default=900.0, metavar="S", help="for the new one to get ready")
    parser.add_argument("--mirror-limit", type=float, default=1800.0, metavar="S", help="for the comparison")
    parser.add_argument("--drain-limit", type=float, default=600.0, metavar="S", help="for the old one to drain")
    parser.add_argument("--json", action="store_true", help="the result, on standard output")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
