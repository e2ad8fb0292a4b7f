"""The mocker's blocks against a pool that looks at each of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bireme.engines.mocker.blocks import MockBlockPool

SIZE = 4
LONG = 40 * SIZE  # tokens: such prompts are remembered
PROMPTS = st.tuples(st.integers(1, 3 * SIZE), st.integers(0, 2), st.integers(0, LONG), st.integers(0, 2))


def tokens_of(begin, kind, count, answer):
    """Return a prompt of one of few kinds, so that many begin alike, and what is generated after it."""
    prompt = [1] * begin + [2 + kind] * count
    return np.array(prompt, np.int32).tobytes(), np.array(prompt + [9 + answer] * 3 * SIZE, np.int32).tobytes()


def blocks_of(tokens):
    """Return each full block as all tokens up to its end."""
    return [tokens[:end] for end in range(4 * SIZE, len(tokens) + 1, 4 * SIZE)]


@given(st.lists(st.tuples(st.booleans(), PROMPTS), max_size=40))
def test_blocks_are_shared_and_counted_as_if_each_were_looked_at(actions):
    pool, running = MockBlockPool(120, SIZE, True), []
    for is_end, kind in actions:
        if is_end and running:
            pool.free(running.pop(0)[0])
        else:
            prompt, whole = tokens_of(*kind)
            content, num_tokens = pool.content(prompt, "", ""), len(whole) // 4
            in_use = {block for _, blocks in running for block in blocks}
            held = pool.allocate(content.keys, num_tokens, (len(prompt) // 4 - 1) // SIZE)
            if held is None:
                continue
            shared = [block in in_use for block in blocks_of(prompt)[: (len(prompt) // 4 - 1) // SIZE]]
            assert held.num_shared >= [*shared, False].index(False)
            pool.publish(held, content)
            pool.publish(held, pool.content(whole, "", "", content))
            running.append((held, blocks_of(whole)))
        in_use = {block for _, blocks in running for block in blocks}
        assert pool.num_used == len(in_use) + sum(holding.num_private for holding, _ in running)
        assert pool.num_used + pool.num_cached <= pool.num_blocks
    for holding, _ in running:
        pool.free(holding)
    assert pool.num_used == 0


def test_a_prompt_that_begins_as_one_before_has_the_same_blocks_as_alone():
    pool = MockBlockPool(1000, SIZE, True)
    texts = [tokens_of(1, 0, LONG, 0)[0], tokens_of(1, 0, LONG - 9, 1)[1], tokens_of(1, 1, LONG, 0)[0]]
    for lora_name in ("", "a", ""):
        for text in texts:
            alone = MockBlockPool(1000, SIZE, True).content(text, lora_name, "")
            assert pool.content(text, lora_name, "").keys == alone.keys
