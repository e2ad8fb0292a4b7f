"""Requests made with known statistics. The same seed makes the same requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from bireme.sizing.simulator.trace import TOKENS_PER_BLOCK, SimulatedRequest, spread

Random = np.random.Generator


class GrowingContext:
    """A context that grows. What is full stays as it is, so later prompts begin with the blocks of earlier ones."""

    def __init__(self, fresh: Iterator[int], blocks: list[int], num_tokens: int) -> None:
        self._fresh, self._blocks, self.num_tokens = fresh, blocks, num_tokens

    def grow(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        while len(self._blocks) < self.num_tokens // TOKENS_PER_BLOCK:
            self._blocks.append(next(self._fresh))

    def fork(self) -> GrowingContext:
        return GrowingContext(self._fresh, list(self._blocks), self.num_tokens)

    def ask(self, arrival_s: float, num_output: int) -> SimulatedRequest:
        return SimulatedRequest(arrival_s, self.num_tokens, num_output, spread(np.array(self._blocks, np.uint64)))


def fresh_ids() -> Iterator[int]:
    yield from range(1 << 40)


def conversations(seed: int, count: int, rate: float) -> list[SimulatedRequest]:
    """Chats with the statistics of Mooncake's conversation trace.

    There, of 12,031 requests in 3,537 s, prompts had 12,035 tokens in the mean (median 6,909, 90% below 27,400) and
    answers 343. The first block was the same in all, and 39% went on with an earlier prompt, after 124 s in the median.
    An endless cache would have found 38% of the full blocks. Requests came together, every three seconds.
    """
    random, fresh = np.random.default_rng(seed), fresh_ids()
    system = GrowingContext(fresh, [next(fresh)], TOKENS_PER_BLOCK)
    found: list[SimulatedRequest] = []
    duration, at = count / rate, 0.0
    while (at := at + random.exponential(1.61 / rate)) < duration:
        chat, now = system.fork(), at
        chat.grow(int(np.clip(random.lognormal(8.64, 1.21), 380, 125_000)))
        while now < duration:
            found.append(chat.ask(now // 3 * 3, _answer(random)))
            if random.random() > 0.4:
                break
            chat.grow(int(random.lognormal(6.2, 1.4)))
            now += random.lognormal(4.82, 0.95)
    return _first(found, count)


def multi_turn(seed: int, count: int, rate: float) -> list[SimulatedRequest]:
    """Chats of eight turns, ten seconds apart, with a system prompt of 4,096 tokens of one of twenty kinds."""
    random, fresh = np.random.default_rng(seed), fresh_ids()
    kinds = [_grown(fresh, 4096) for _ in range(20)]
    found: list[SimulatedRequest] = []
    at = 0.0
    while len(found) < 2 * count:
        at += random.exponential(8 / rate)
        chat, now = kinds[random.integers(len(kinds))].fork(), at
        for _ in range(8):
            chat.grow(int(random.exponential(600)) + 20)
            found.append(chat.ask(now, _answer(random)))
            chat.grow(found[-1].num_output)
            now += random.exponential(10)
    return _first(found, count)


def shared_prefix(seed: int, count: int, rate: float, share: float = 0.05) -> list[SimulatedRequest]:
    """Prompts of 8,192 tokens, of which `share` is one of ten beginnings, the rest is new."""
    random, fresh = np.random.default_rng(seed), fresh_ids()
    beginnings = [_grown(fresh, max(TOKENS_PER_BLOCK, int(share * 8192))) for _ in range(10)]
    arrivals = np.cumsum(random.exponential(1 / rate, count))
    found = []
    for at in arrivals.tolist():
        prompt = beginnings[random.integers(len(beginnings))].fork()
        prompt.grow(int(8192 * random.uniform(0.5, 1.5)) - prompt.num_tokens)
        found.append(prompt.ask(at, _answer(random)))
    return found


def agentic(seed: int, count: int, rate: float) -> list[SimulatedRequest]:
    """Agents with tools: contexts of 20,000 tokens and more, steps a few seconds apart, and bursts of sub-agents.

    Now and then an agent starts 8 to 80 sub-agents at one time, all with its own whole context, for three steps each.
    """
    random, fresh = np.random.default_rng(seed), fresh_ids()
    tools = _grown(fresh, 12_288)
    found: list[SimulatedRequest] = []
    at = 0.0
    while len(found) < 2 * count:
        at += random.exponential(40 / rate)
        agent, now = tools.fork(), at
        agent.grow(int(random.lognormal(9, 0.5)))
        for step in range(12):
            found.append(agent.ask(now, _answer(random)))
            agent.grow(found[-1].num_output + int(random.exponential(1500)))
            now += random.exponential(6)
            if step % 6 == 5 and random.random() < 0.3:
                for _ in range(int(random.integers(8, 81))):
                    sub, later = agent.fork(), now
                    for _ in range(3):
                        sub.grow(int(random.exponential(400)) + 50)
                        found.append(sub.ask(later, _answer(random)))
                        later += random.exponential(5)
    return _first(found, count)


def poisson_chats(random: Random, rate: float, seconds: float, scale: float = 1.0) -> Iterator[tuple[float, int, int]]:
    """Yield arrival, prompt and answer tokens: lognormal, 235 and 200 in the mean."""
    at = 0.0
    while (at := at + random.exponential(1 / rate)) < seconds:
        lengths = (random.lognormal(np.log(mean * scale) - 0.32, 0.8) for mean in (235, 200))
        num_prompt, num_output = (int(min(max(one, 4), 1500 * scale)) for one in lengths)
        yield at, num_prompt, num_output


def day(seed: int, count: int, rate: float) -> list[SimulatedRequest]:
    """Chats whose prompts share nothing, at `rate` in the mean: a tenth of its double at 4, the most at 16 o'clock.

    The day is as long as the requests take, 24 hours at 250,000 of 2.9 a second.
    """
    random, fresh = np.random.default_rng(seed), fresh_ids()
    seconds, found = count / rate, []
    for at, num_prompt, num_output in poisson_chats(random, 2 * rate, seconds):
        if random.random() > 0.5 - 0.45 * np.cos(2 * np.pi * (at / seconds - 1 / 6)):
            continue
        found.append(_grown(fresh, num_prompt).ask(at, num_output))
    return _first(found, count)


GENERATORS: dict[str, Callable[[int, int, float], list[SimulatedRequest]]] = {
    "conversations": conversations,
    "multi_turn": multi_turn,
    "shared_prefix": shared_prefix,
    "agentic": agentic,
    "day": day,
}


def _answer(random: Random) -> int:
    return int(np.clip(random.normal(342, 200), 3, 2000))


def _grown(fresh: Iterator[int], num_tokens: int) -> GrowingContext:
    context = GrowingContext(fresh, [], 0)
    context.grow(num_tokens)
    return context


def _first(requests: list[SimulatedRequest], count: int) -> list[SimulatedRequest]:
    return sorted(requests, key=lambda one: one.arrival_s)[:count]
