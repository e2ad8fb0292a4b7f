"""Days of requests whose rate changes, for what decides about workers. The same seed makes the same day."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bireme.sizing.simulator.synthetic import GrowingContext, Random, fresh_ids
from bireme.sizing.simulator.trace import SimulatedRequest, spread

DAY_S, HOUR_S = 86_400.0, 3600.0
_CALM_S = 300.0  # the rate's own noise has one value for so long
# By the hour, of the busiest one: a quiet night, a morning that rises, a dip at noon, an evening
_CHATS = (
    *(0.16, 0.12, 0.09, 0.08, 0.08, 0.10, 0.18, 0.32, 0.55, 0.78, 0.92, 0.95),
    *(0.78, 0.80, 0.93, 1.00, 0.98, 0.86, 0.70, 0.62, 0.60, 0.52, 0.38, 0.24),
)
# Office hours, and jobs that run at night
_AGENTS = (
    *(0.10, 0.10, 0.35, 0.35, 0.10, 0.08, 0.08, 0.15, 0.45, 0.85, 1.00, 0.95),
    *(0.60, 0.75, 1.00, 1.00, 0.95, 0.80, 0.45, 0.25, 0.15, 0.12, 0.10, 0.10),
)
# A curve with one top, at 16 o'clock, and a tenth of it at 4
_SMOOTH = tuple(0.55 - 0.45 * np.cos(2 * np.pi * (hour - 4) / 24) for hour in range(24))


def chats_day(seed: int, rate: float = 0.5, end_s: float = DAY_S) -> list[SimulatedRequest]:
    """Chats that share nothing, 5,000 and 500 tokens in the mean (lognormal), at `rate` in the busiest hour.

    The rate is off its curve by a fifth (standard deviation), for minutes. Nothing arrives from `end_s` on: a part of
    a day is the same requests as in the whole one.
    """
    random, fresh = np.random.default_rng(seed), fresh_ids()
    noise = _noise(random, 0.2)
    found = []
    for at in _arrivals(random, rate, lambda now: _at_hour(_CHATS, now) * noise(now), end_s):
        num_prompt, num_output = (
            int(min(random.lognormal(np.log(mean) - 0.32, 0.8), 8 * mean)) for mean in (5000, 500)
        )
        chat = GrowingContext(fresh, [], 0)
        chat.grow(max(num_prompt, 4))
        found.append(chat.ask(at, max(num_output, 4)))
    return found


def agents_day(seed: int, rate: float = 0.02, end_s: float = DAY_S) -> list[SimulatedRequest]:
    """Agents with tools that come at `rate` in the busiest hour, 12 steps each, and start sub-agents all at once.

    Tools and system prompt are 12,288 tokens in all, the task 4,000 in the median, and each step adds its answer and
    a tool's, 2,500 in the mean. A third of the agents starts 4 to 24 sub-agents, of three steps each. `end_s`: see
    `chats_day`.
    """
    random, fresh = np.random.default_rng(seed), fresh_ids()
    tools = GrowingContext(fresh, [], 0)
    tools.grow(12_288)
    noise = _noise(random, 0.5)
    found = list[SimulatedRequest]()
    for begin in _arrivals(random, rate, lambda now: _at_hour(_AGENTS, now) * noise(now), end_s):
        agent, now = tools.fork(), begin
        agent.grow(int(random.lognormal(np.log(4000), 0.5)))
        forks_at = int(random.integers(3, 10)) if random.random() < 1 / 3 else -1
        for step in range(12):
            found.append(agent.ask(now, _agent_answer(random)))
            agent.grow(found[-1].num_output + int(random.exponential(2500)))
            now += 10 + random.exponential(15)
            if step == forks_at:
                for _ in range(int(random.integers(4, 25))):
                    found.extend(_sub_agent(random, agent.fork(), now))
    return sorted((one for one in found if one.arrival_s < end_s), key=lambda one: one.arrival_s)


def recorded_day(seed: int, hour: Sequence[SimulatedRequest], share: float = 0.15) -> list[SimulatedRequest]:
    """A recorded hour 24 times over, of which each hour of the day keeps as many chats as its time has.

    `share` of the recorded chats in the busiest hour. Arrivals, lengths and what prompts share are the recorded ones;
    a chat is told by the second block of its prompts. What is repeated has blocks of its own but for the first one.
    """
    random = np.random.default_rng(seed)
    found = list[SimulatedRequest]()
    for number in range(24):
        kept = dict[int, bool]()
        for one in hour:
            if one.arrival_s >= HOUR_S:
                break
            now = number * HOUR_S + one.arrival_s
            chat = int(one.blocks[1]) if len(one.blocks) > 1 else -len(found) - 1
            if kept.setdefault(chat, bool(random.random() < share * _at_hour(_SMOOTH, now))):
                blocks = np.concatenate([one.blocks[:1], spread(one.blocks[1:] ^ np.uint64(number))])
                found.append(SimulatedRequest(now, one.num_prompt, one.num_output, blocks))
    return found


def _at_hour(shares: Sequence[float], now: float) -> float:
    """Between two hours on the line from one to the other."""
    hour = now / HOUR_S % 24
    before, part = int(hour), hour % 1
    return shares[before] * (1 - part) + shares[(before + 1) % 24] * part


def _noise(random: Random, deviation: float) -> Callable[[float], float]:
    """Return a factor of 1 in the mean that drifts: each value keeps 0.7 of the one before."""
    size, values = int(DAY_S // _CALM_S) + 1, list[float]()
    state = 0.0
    for draw in random.normal(0.0, deviation * np.sqrt(1 - 0.7**2), size):
        state = 0.7 * state + float(draw)
        values.append(float(np.exp(state - deviation**2 / 2)))
    return lambda now: values[int(now // _CALM_S)]


def _arrivals(random: Random, rate: float, share: Callable[[float], float], end_s: float) -> Iterator[float]:
    """Yield the times of a Poisson process whose rate changes, by thinning one that is four times as fast."""
    at, most = 0.0, 4.0
    while (at := at + float(random.exponential(1 / (most * rate)))) < end_s:
        if random.random() * most < share(at):
            yield at


def _sub_agent(random: Random, context: GrowingContext, now: float) -> Iterator[SimulatedRequest]:
    for _ in range(3):
        context.grow(int(random.exponential(400)) + 50)
        yield context.ask(now, _agent_answer(random))
        now += 5 + random.exponential(10)


def _agent_answer(random: Random) -> int:
    return int(np.clip(random.lognormal(4.8, 0.7), 3, 2000))
