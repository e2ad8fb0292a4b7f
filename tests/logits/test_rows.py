from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bireme.logits.rows import Row, TokenCounts
from bireme.messages import SamplingParams

VOCAB = 1000


@given(st.lists(st.integers(-5, VOCAB + 5), max_size=200), st.lists(st.integers(0, VOCAB - 1), max_size=300))
def test_counts_are_of_all_tokens_seen_however_many(prompt, output):
    counts = TokenCounts(VOCAB)
    counts.see(prompt)
    for token in output:
        counts.generate(token)
    generated = Counter(output)
    expected = {token: generated[token] for token in {*prompt, *output} if 0 <= token < VOCAB}
    assert dict(zip(counts.ids.tolist(), counts.outputs.tolist(), strict=True)) == expected


def test_a_row_without_any_processing_is_plain():
    assert Row(SamplingParams(repetition_penalty=1.0, logprobs=3, top_k=0), [1], [], [2], VOCAB).is_plain
    assert not Row(SamplingParams(bad_token_ids=((1,),)), [1], [], [2], VOCAB).is_plain


def test_a_bad_sequence_is_banned_when_its_beginning_has_just_come():
    row = Row(SamplingParams(bad_token_ids=((5,), (1, 2, 3))), [0, 1], [], [], VOCAB)
    assert row.banned().tolist() == [5]
    row.append(2)
    assert row.banned().tolist() == [5, 3]
