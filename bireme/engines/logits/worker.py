"""The child: `python -m bireme.engines.logits.worker --socket FD --parent PID`; started only by the stub.

It takes one job after the other from the inherited socket, and ends when the other side closes it.
"""

from __future__ import annotations

import argparse
import socket
import sys

from bireme.own_process import die_with_parent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bireme.engines.logits.worker", description="Applies logits processors.")
    parser.add_argument("--socket", type=int, required=True, help="inherited file descriptor")
    parser.add_argument("--parent", type=int, required=True, help="process id to live and die with")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    return _serve(socket.socket(fileno=options.socket))


def _serve(channel: socket.socket) -> int:
    from bireme.engines.logits import frames
    from bireme.engines.stub.process_log import start_log
    from bireme.errors import to_message
    from bireme.logits.application import apply, warm_up

    start_log("logits_processor engine")
    try:
        warm_up()
    except Exception as error:
        frames.send(channel, frames.LogitsReply(error=to_message(error)))
        return 1
    frames.send(channel, frames.LogitsReply())
    while True:
        try:
            job = frames.receive_job(channel)
        except (EOFError, ConnectionError):
            return 0
        try:
            answer = frames.LogitsReply(apply(job).tobytes())
        except Exception as error:
            answer = frames.LogitsReply(error=to_message(error))
        frames.send(channel, answer)


if __name__ == "__main__":
    sys.exit(main())
