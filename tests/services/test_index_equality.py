"""Our index and the RadixTree of ai-dynamo's wheel, an independent reader, find the same in one stream of KV events.

The RadixTree knows one tier, so it gets no events of host memory: ours, which gets them, must find the same on devices.
Salted blocks have no tokens from which it could compute its own hashes. Attention windows are not in the stream: only
blocks of the widest are told. A hole in the middle of a chain takes what follows from the RadixTree for good, from ours
until it is filled; pools remove leaves first, as here.
"""

import json
import random
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.contenders import dynamo
from bireme.engines.mocker.blocks import MockBlockPool
from bireme.kv.blocks import hashing
from bireme.kv.blocks.events import EventBuffer
from bireme.kv.blocks.hashing import MediaSpan
from bireme.kv.following.index import KvIndex
from bireme.kv.publishing.held_blocks import HeldBlocks
from bireme.kv.routing.prompt_hashing import PromptHasher
from bireme.kv.wire.event_reading import EventReader
from bireme.kv.wire.event_wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    encode_payload,
)

SIZE = 16
READER = Path(__file__).parent / "radix_tree_reader.py"


class Engine:
    """The mocker's pool of blocks and what its publisher would send."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.buffer = EventBuffer(100_000)
        self.pool = MockBlockPool(90, SIZE, True, self.buffer)
        self.held = HeldBlocks(SIZE, b"key")
        self.running = []

    def step(self, prompt, lora_name):
        if self.running and self.random.random() < 0.5:
            self.pool.free(self.running.pop(self.random.randrange(len(self.running))))
            return
        tokens = hashing.token_bytes(prompt)
        content = self.pool.content(tokens, lora_name, "")
        if (holding := self.pool.allocate(content.keys, len(prompt), len(content.keys))) is not None:
            self.pool.begin(holding, content)
            self.pool.publish(holding, content)
            self.running.append(holding)

    def batch(self):
        return self.held.apply(self.buffer.drain())


class Stream:
    """Steps for both readers, and the answers of ours."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.engines = [Engine(number) for number in range(6)]
        self.index, self.hasher, self.reader = KvIndex(), PromptHasher(SIZE), EventReader()
        self.slots = [self.index.add_worker(str(number)) for number in range(6)]
        self.has_gap = [False] * 6
        self.trunks = [[self.random.randrange(1 << 17) for _ in range(SIZE * 12)] for _ in range(5)]
        self.steps, self.answers = [], []
        self.kinds = {"gap": 0, "lost": 0, "BlockRemoved": 0, "StoredHashes": 0, "AllBlocksCleared": 0}
        self.kinds |= {"pictures": 0, "host": 0}
        self.num_with_pictures = 0

    def prompt(self):
        trunk = self.random.choice(self.trunks)
        end = self.random.randint(1, len(trunk))
        tail = random.Random(self.random.randrange(40)).choices(range(1 << 17), k=SIZE * 8)
        return trunk[:end] + tail[: self.random.randint(0, SIZE * 8)], self.random.choice(["", "", "adapter-a"])

    def events(self):
        number = self.random.randrange(6)
        if self.random.random() < 0.003:
            self.steps.append(("lost", number, None, ""))
            self.index.remove_worker(self.slots[number])
            self.slots[number] = self.index.add_worker(str(number))
            self.engines[number], self.has_gap[number] = Engine(self.random.random()), False
            self.kinds["lost"] += 1
            return
        engine = self.engines[number]
        engine.step(*self.prompt())
        if not (events := engine.batch()):
            return
        if self.random.random() < 0.02:
            self.has_gap[number] = True
            self.kinds["gap"] += 1
            return
        if self.has_gap[number] or self.random.random() < 0.002:
            events, self.has_gap[number] = [AllBlocksCleared(), *engine.held.snapshot()], False
        if self.random.random() < 0.1:
            events = [*events, *self.pictures(), *self.host()]
        payload = encode_payload(EventBatch(0.0, events, 0))
        self.steps.append(("batch", number, payload, ""))
        for event in decode_batch(payload).events:
            self.kinds[type(event).__name__] += 1
        (batch,) = self.reader.read([payload])
        self.index.apply(batch.changes.of_slot(self.slots[number]))

    def pictures(self):
        """All blocks of a prompt with pictures, then the removal of some that only prompts with both pictures have."""
        prompt, spans = self.picture_prompt()
        hashes = self.hasher(np.array(prompt, np.int32), media=spans).tolist()
        keys = [[item["mm_key"] for item in shown] or None for shown in self.shown(spans, len(hashes))]
        self.kinds["pictures"] += 1
        stored = BlockStored(hashes, None, prompt[: len(hashes) * SIZE], SIZE, extra_keys=keys)
        return [stored, BlockRemoved(hashes[self.random.randint(2, len(hashes)) :][::-1])]

    def picture_prompt(self):
        trunk = self.random.choice(self.trunks)
        first = self.random.randrange(3) * 5  # in the first block: no prompt without pictures shares any
        digests = [bytes([self.random.randrange(3)]) * 32 for _ in range(2)]
        return trunk, (MediaSpan(first, first + 24, digests[0]), MediaSpan(first + 24, first + 50, digests[1]))

    def shown(self, spans, num_blocks):
        return [
            [
                {"mm_hash": span.event_hash, "mm_key": f"{span.event_hash:016x}{'0' * 48}"}
                for span in hashing.media_in(spans, at * SIZE, (at + 1) * SIZE)
            ]
            for at in range(num_blocks)
        ]

    def host(self):
        prompt, lora_name = self.prompt()
        hashes = self.hasher(np.array(prompt, np.int32), hashing.event_seed(lora_name)).tolist()
        self.kinds["host"] += 1
        stored = BlockStored(hashes, None, [], 0, medium="CPU")
        return [stored, BlockRemoved(hashes[self.random.randint(0, len(hashes)) :], "CPU")]

    def ask(self):
        (prompt, lora_name), spans = self.prompt(), ()
        if self.random.random() < 0.1:
            (prompt, spans), lora_name = self.picture_prompt(), ""
        shown = self.shown(spans, len(prompt) // SIZE)
        infos = [
            {"mm_objects": [{"mm_hash": one["mm_hash"], "offsets": []} for one in some]} if some else None
            for some in shown
        ]
        self.steps.append(("ask", 0, (SIZE, prompt, infos), lora_name))
        hashes = self.hasher(np.array(prompt, np.int32), hashing.event_seed(lora_name), spans)
        depths = self.index.match(hashes)[0]
        self.answers.append({str(number): int(depths[slot]) for number, slot in enumerate(self.slots) if depths[slot]})
        self.num_with_pictures += bool(spans) and bool(self.answers[-1])


@pytest.mark.parametrize("num_questions", [2_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_prompts_have_the_overlaps_that_the_radix_tree_finds(tmp_path, num_questions):
    stream = Stream(1)
    for _ in range(num_questions):
        stream.events()
        stream.events()
        stream.ask()
    least = num_questions // 400
    assert min(stream.kinds.values()) > least and stream.num_with_pictures > least, stream.kinds
    file = tmp_path / "stream"
    file.write_bytes(msgspec.msgpack.encode(stream.steps))
    ran = subprocess.run([dynamo.environment(), str(READER), str(file)], check=True, capture_output=True)
    theirs = json.loads(ran.stdout)
    different = [
        (number, ours, other)
        for number, (ours, other) in enumerate(zip(stream.answers, theirs, strict=True))
        if ours != other
    ]
    assert different == []
    assert sum(map(len, theirs)) > num_questions
