"""A cache of two tiers as one would write it down: what is found where, without blocks, hashes or copies."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from bireme.kv.blocks.events import DEVICE, HOST


class NaiveCache:
    """Two lists, oldest first. What lies on the device and not in use has its copy in host memory."""

    def __init__(self, num_device: int, num_host: int, size: int) -> None:
        self.num_device, self.num_host, self.size = num_device, num_host, size
        self.device: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self.host: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def run(self, tokens: Sequence[int]) -> dict[int, int]:
        """Serve a prompt whole; return the blocks that it found, by tier."""
        num_full, whole = len(tokens) // self.size, -(-len(tokens) // self.size)
        keys = [tuple(tokens[: (at + 1) * self.size]) for at in range(num_full)]
        count = 0
        while count < (len(tokens) - 1) // self.size and (keys[count] in self.device or keys[count] in self.host):
            count += 1
        found = Counter(DEVICE if key in self.device else HOST for key in keys[:count])
        pinned = [key for key in keys[:count] if key not in self.device]
        for key in keys[:count]:
            self.device.pop(key, None)  # in use
        self.make_room(count)
        for key in pinned:
            self.host.move_to_end(key)
        self.make_room(whole)
        for key in reversed(keys):  # the end of a prompt is evicted before its beginning
            self.device.pop(key, None)
            self.device[key] = None
        while absent := [key for key in self.device if key not in self.host]:
            for key in absent:
                if len(self.host) == self.num_host:
                    self.host.popitem(last=False)
                self.host[key] = None
        return dict(found)

    def make_room(self, num_used: int) -> None:
        while len(self.device) + num_used > self.num_device:
            gone, _ = self.device.popitem(last=False)
            self.host.move_to_end(gone)
