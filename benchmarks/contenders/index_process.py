"""A prefix index in a process of its own, told what to do by lines of JSON: bireme's KvIndex, or ai-dynamo's RadixTree.

    python -m benchmarks.contenders.index_process bireme
    python -m benchmarks.contenders.index_process dynamo          (with the python of ai-dynamo's environment)

Both do the same with the same blocks; each is fed its natural form, made outside of what is timed: ours the msgpack of
the event plane, or arrays; the RadixTree JSON. Each line {"do": NAME, ...} is answered by one line.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint64]
_TOKENS_PER_BLOCK = 32  # ours carry them, as vLLM's do
_PORTION = 512  # events that are made before they are timed
_READ_AT_ONCE = 40  # of 64 blocks: what the feed reads together


def chains(first: int, count: int, depth: int) -> Blocks:
    """Return the blocks of chains [first, first + count), [count, depth]: always the same ones."""
    return np.stack(
        [np.random.default_rng(number).integers(1, 1 << 63, depth, np.uint64) for number in range(first, first + count)]
    )


class Ours:
    def __init__(self) -> None:
        from bireme.kv.following.index import KvIndex
        from bireme.kv.wire import event_wire
        from bireme.kv.wire.event_reading import EventReader

        self._wire, self._reader = event_wire, EventReader()
        self.index = KvIndex()
        self._slots: list[int] = []

    def add_workers(self, count: int) -> None:
        self._slots += [self.index.add_worker(f"worker_{number}") for number in range(len(self._slots), count)]

    def event(self, blocks: Blocks, parent: int | None, form: str) -> Any:
        if form == "arrays":
            return parent, blocks
        tokens = list(range(_TOKENS_PER_BLOCK * len(blocks)))
        stored = self._wire.BlockStored(blocks.tolist(), parent, tokens, _TOKENS_PER_BLOCK)
        return self._wire.encode_payload(self._wire.EventBatch(0.0, [stored], 0))

    def apply(self, events: list[tuple[int, Any]]) -> None:
        """As the feed does it: messages are read together, and the index told of them at once."""
        if type(events[0][1]) is tuple:
            for worker, event in events:
                self.index.stored(self._slots[worker], *event)
            return
        for first in range(0, len(events), _READ_AT_ONCE):
            part = events[first : first + _READ_AT_ONCE]
            run = None
            for (worker, _), batch in zip(part, self._reader.read([payload for _, payload in part]), strict=True):
                assert batch is not None
                changes = batch.changes.of_slot(self._slots[worker])
                run = changes if run is None else run.joined(changes)
                assert run is not None
            self.index.apply(run)

    def query(self, blocks: Blocks) -> Any:
        return blocks

    def match(self, query: Any) -> Any:
        return self.index.match(query)

    def read(self, found: Any) -> list[int]:
        return [int(depth) for depth in found[0] if depth]

    def nbytes(self) -> int:
        return self.index.nbytes


class RadixTree:
    def __init__(self) -> None:
        from dynamo._core import RadixTree as Tree

        self._tree = Tree()
        self._number = 0

    def add_workers(self, count: int) -> None:
        pass

    def event(self, blocks: Blocks, parent: int | None, form: str) -> Any:
        self._number += 1
        stored = {
            "parent_hash": None if parent is None else parent ^ 1,
            "blocks": [{"block_hash": one ^ 1, "tokens_hash": one} for one in blocks.tolist()],
        }
        return json.dumps({"event_id": self._number, "data": {"stored": stored}, "dp_rank": 0}).encode()

    def apply(self, events: list[tuple[int, Any]]) -> None:
        for worker, event in events:
            self._tree.apply_event(worker, event)

    def query(self, blocks: Blocks) -> Any:
        return blocks.tolist()

    def match(self, query: Any) -> Any:
        return self._tree.find_matches(query)

    def read(self, found: Any) -> list[int]:
        return list(found.scores.values())

    def nbytes(self) -> int:
        return 0


class IndexProcess:
    def __init__(self, make: Callable[[], Ours | RadixTree]) -> None:
        self._make = make
        self._index = make()  # loads what is loaded once
        self._num_chains = 0

    def load(self, workers: int, per_worker: int, depth: int, form: str, sharing: int = 1) -> dict[str, float]:
        """Make a new index in which each worker holds chains; `sharing` of them hold the same."""
        del self._index
        before = resident_bytes()
        self._index = self._make()
        self._index.match(self._index.query(np.zeros(1, np.uint64)))
        self._index.add_workers(workers)
        self._num_chains = workers * per_worker // sharing
        seconds = 0.0
        for numbers in portions(self._num_chains):
            made = chains(numbers.start, len(numbers), depth)
            events = [
                (
                    number % (workers // sharing) * sharing + other,
                    self._index.event(made[number - numbers.start], None, form),
                )
                for number in numbers
                for other in range(sharing)
            ]
            seconds += self._apply(events)
        memberships = self._num_chains * depth * sharing
        used = resident_bytes() - before
        return {
            "memberships": memberships,
            "blocks_per_s": memberships / seconds,
            "bytes_per_membership": used / memberships,
            "own_bytes_per_membership": self._index.nbytes() / memberships,
        }

    def share(self, workers: int, depth: int, form: str, staggered: bool) -> dict[str, float]:
        """One more prefix that all workers hold; staggered: each to another depth."""
        prefix = chains(1 << 40 | staggered, 1, depth)[0]
        events = [
            self._index.event(prefix[: 1 + number % depth] if staggered else prefix, None, form)
            for number in range(workers)
        ]
        self._index.apply(list(enumerate(events)))
        return self._times([self._index.query(prefix)] * 2000, workers)

    def match(self, depth: int, count: int) -> dict[str, float]:
        """Prompts that a worker holds whole, at random."""
        numbers = np.random.default_rng(7).integers(0, self._num_chains, count).tolist()
        return self._times([self._index.query(chains(number, 1, depth)[0]) for number in numbers], 1)

    def grow_one_by_one(self, count: int, form: str) -> dict[str, float]:
        """Events of one block each, as decoding fills them."""
        made = chains(1 << 41, 1, count)[0]
        events = [
            self._index.event(made[number : number + 1], int(made[number - 1]) if number else None, form)
            for number in range(count)
        ]
        return {"blocks_per_s": count / self._apply([(0, event) for event in events])}

    def _apply(self, events: list[tuple[int, Any]]) -> float:
        """Return the seconds of CPU until a match sees all of them: the RadixTree has a queue and a thread."""
        last = self._index.query(np.ones(1, np.uint64))
        began = time.process_time()
        self._index.apply(events)
        self._index.match(last)
        return time.process_time() - began

    def _times(self, queries: list[Any], num_holders: int) -> dict[str, float]:
        """Microseconds of a match, whose result is left unread."""
        index, clock = self._index, time.perf_counter_ns
        assert len(index.read(index.match(queries[0]))) >= num_holders, "what was loaded is not found"
        plain = []
        for query in queries:
            began = clock()
            index.match(query)
            plain.append(clock() - began)
        p50, p99 = np.percentile(np.array(plain) / 1e3, [50, 99])
        return {"p50_us": float(p50), "p99_us": float(p99)}

    def decide(self, tokens: int, workers: int, count: int, salt: str = "") -> dict[str, float]:
        """Place prompts through a pipeline's router; each worker holds another part of them and has 8 requests running.

        ai-dynamo's Python has no router of this kind.
        """
        from bireme.config import RouterConfig
        from bireme.discovery.records import WorkerRecord
        from bireme.kv.following.holdings import IndexHoldings
        from bireme.kv.routing.placement import RoutingRequest
        from bireme.kv.routing.router import WorkerRouter
        from bireme.kv.wire.event_wire import WorkerLoad
        from bireme.metrics import Registry
        from bireme.pipelines.routing import prompt_hashes
        from bireme.serving_options import ServingOptions

        random, config, hash_prompt = np.random.default_rng(3), RouterConfig(), prompt_hashes(b"a deployment's key")
        prompts = [random.integers(0, 100_000, tokens).astype(np.int32) for _ in range(8)]
        requests = [RoutingRequest(prompt, ServingOptions(cache_salt=salt)) for prompt in prompts]
        records = {
            f"decode_{number}": WorkerRecord(worker=f"decode_{number}", tokens_per_block=32, event_endpoint="ipc://x")
            for number in range(workers)
        }
        holdings = IndexHoldings(config, Registry("generate"))
        loads = {name: WorkerLoad(8, 1, 2 * tokens, 8 * tokens // 32, 1 << 20, 0) for name in records}
        router = WorkerRouter(
            config, "kv", holdings=holdings, hash_prompt=hash_prompt, loads=loads, followers=[holdings]
        )
        router.set_workers(records)
        for number, name in enumerate(records):
            for request in requests:
                hashes = hash_prompt(request, 32)
                holdings.index.stored(holdings.index.slots[name], None, hashes[: 1 + len(hashes) * number // workers])
        running = [router.place(requests[number % 8]) for number in range(8 * workers)]
        decided, counted = [], []
        for number in range(count):
            began = time.perf_counter()
            placement = router.place(requests[number % 8])
            placed = time.perf_counter()
            router.prefilled(running[0])
            router.finished(running.pop(0))
            running.append(placement)
            decided.append(placed - began)
            counted.append(time.perf_counter() - placed)
        p50, p99 = np.percentile(np.array(decided) * 1e6, [50, 99])
        return {"p50_us": float(p50), "p99_us": float(p99), "end_p50_us": float(np.median(counted)) * 1e6}


def portions(count: int) -> Iterator[range]:
    for first in range(0, count, _PORTION):
        yield range(first, min(first + _PORTION, count))


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    process = IndexProcess({"bireme": Ours, "dynamo": RadixTree}[sys.argv[1]])
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(process, order.pop("do"))(**order)), flush=True)


if __name__ == "__main__":
    main()
