"""Which blocks of a prompt each worker's requests use."""

import random
from collections import Counter

import numpy as np
import pytest

from bireme.kv.routing.block_uses import BlockUses


def blocks(*hashes):
    return np.array(hashes, np.uint64)


@pytest.mark.parametrize(("prompt", "shared"), [((1, 2, 3, 9), 3), ((1, 8), 1), ((1, 2, 3), 3), ((7,), 0), ((), 0)])
def test_a_prompts_blocks_in_use_are_found_from_its_start(prompt, shared):
    uses = BlockUses()
    one, other = uses.new_user(), uses.new_user()
    uses.add(one, blocks(1, 2, 3))
    assert uses.shared(np.array([other, one]), blocks(*prompt)).tolist() == [0, shared]


@pytest.mark.parametrize(("num_held", "found"), [(5, 3), (3.75, 1), (2, 0), (0, 0), (99, 3)])
def test_the_last_of_held_blocks_that_are_in_use_are_told(num_held, found):
    uses = BlockUses()
    one = uses.new_user()
    uses.add(one, blocks(3, 4, 5))
    assert uses.last(np.array([one]), blocks(1, 2, 3, 4, 5), np.array([num_held], float)).tolist() == [found]


@pytest.mark.parametrize("seed", range(5))
def test_uses_are_counted_as_by_a_counter_for_each_user_and_memory_is_given_back(seed):
    chance, uses, running = random.Random(seed), BlockUses(), []
    users = [uses.new_user() for _ in range(4)]
    counters = {user: Counter() for user in users}
    for step in range(400):
        user, first = chance.choice(users), chance.randrange(60)
        used = list(range(first, first + chance.randrange(200)))
        before = len(counters[user])
        if running and (step > 200 or chance.random() < 0.4):
            user, used = running.pop(chance.randrange(len(running)))
            before = len(counters[user])
            counters[user] -= Counter(used)
            assert uses.subtract(user, blocks(*used)) == before - len(counters[user])
        else:
            running.append((user, used))
            counters[user].update(used)
            assert uses.add(user, blocks(*used)) == len(counters[user]) - before
        assert uses.num_entries == sum(map(len, counters.values()))
    while running:
        uses.subtract(*(lambda user, used: (user, blocks(*used)))(*running.pop()))
    assert uses.num_entries == 0 and len(uses._table) == 1024
