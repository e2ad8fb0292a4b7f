"""Run with the python of ai-dynamo's environment: its relay and subscriber read a worker's step records.

    DYN_FILE_KV=FOLDER python step_record_reader.py ENDPOINT COUNT

Prints a JSON list: the first COUNT records of steps, as its own `decode` gives them.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
from dynamo.common.forward_pass_metrics import decode
from dynamo.llm import FpmEventRelay, FpmEventSubscriber
from dynamo.runtime import DistributedRuntime


async def main(endpoint: str, count: int) -> None:
    runtimes = [
        DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq") for _ in ("relay", "reader")
    ]
    at_relay, at_reader = (runtime.endpoint("bireme.decode.generate") for runtime in runtimes)
    relay, subscriber = FpmEventRelay(at_relay, endpoint), FpmEventSubscriber(at_reader)
    found = []
    while len(found) < count:
        record = decode(await asyncio.to_thread(subscriber.recv))
        if record is not None and record.wall_time:
            found.append(record)
    print(msgspec.json.encode(found).decode(), flush=True)
    subscriber.shutdown()
    relay.shutdown()
    for runtime in runtimes:
        runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
