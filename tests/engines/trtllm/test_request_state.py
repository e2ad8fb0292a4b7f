"""Reading TensorRT-LLM's growing result objects: each token once, whatever the object does meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

from bireme.engines.trtllm.request_state import Cursor, Cursors, GenerateArguments, RequestState
from bireme.messages import EngineRequest, SamplingParams


def output(tokens, logprobs=(), index=0, finish_reason=None, stop_reason=None):
    return SimpleNamespace(
        index=index,
        token_ids=list(tokens),
        logprobs=list(logprobs),
        prompt_logprobs=[],
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        token_ids_diff=["stale"],  # never to be read
        logprobs_diff=["stale"],
    )


def run(**fields):
    request = EngineRequest(prompt=b"\0" * 8, sampling=SamplingParams(max_tokens=9, **fields))
    return RequestState(key=(0, 1), request=request, call=GenerateArguments([1, 2], None), stop_ids=(99,))


def test_a_cumulative_list_is_read_piece_by_piece():
    cursor = Cursor()
    assert [cursor.read(output(tokens))[0] for tokens in ([5], [5], [5, 6, 7])] == [[5], [], [6, 7]]


def test_a_cursor_beyond_the_end_gives_nothing_and_does_not_move_back():
    cursor = Cursor()
    cursor.read(output([5, 6, 7]))
    assert cursor.read(output([5, 6])) == ([], None)
    assert cursor.num_read == 3
    assert cursor.read(output([5, 6, 7, 8]))[0] == [8]


def test_several_sequences_have_cursors_of_their_own():
    cursors = Cursors()
    assert cursors.read(output([1, 2], index=0))[0] == [1, 2]
    assert cursors.read(output([3], index=1))[0] == [3]
    assert cursors.read(output([1, 2], index=0))[0] == []  # the other one's news leaves this stale
    assert cursors.read(output([3, 4], index=1))[0] == [4]


def test_a_first_token_without_log_probabilities_does_not_shift_the_others():
    cursor = Cursor()
    assert cursor.read(output([5])) == ([5], None)
    assert cursor.read(output([5, 6], ["six"])) == ([6], ["six"])
    late = Cursor()
    assert late.read(output([5, 6], ["six"])) == ([5, 6], [None, "six"])
    assert late.read(output([5, 6, 7], ["six", "seven"])) == ([7], ["seven"])


def test_log_probabilities_of_a_stop_token_that_was_taken_off_are_dropped():
    cursor = Cursor()
    cursor.read(output([5], ["five"]))
    assert cursor.read(output([5], ["five", "stop"])) == ([], [])


def test_the_ending_token_is_no_news_wherever_it_is_left():
    one = run()
    assert one.read(output([5, 99], finish_reason="stop"), 1.0).tokens == [5]
    assert one.stop_token(output([5, 99], finish_reason="stop")) == 99
    other = run()
    assert other.read(output([5], finish_reason="stop", stop_reason=42), 1.0).tokens == [5]
    assert other.stop_token(output([5], stop_reason=42)) == 42


def test_a_stop_id_that_was_taken_off_takes_no_other_token_along():
    assert run().read(output([5, 99], finish_reason="stop", stop_reason=42), 1.0).tokens == [5, 99]


def test_an_end_id_that_did_not_end_it_is_delivered():
    assert run().read(output([5, 99]), 1.0).tokens == [5, 99]


def test_missing_log_probabilities_get_the_sentinel_not_the_best_value():
    delta = run(logprobs=1).read(output([5], [{8: SimpleNamespace(logprob=-0.1, rank=0)}]), 1.0)
    assert delta.logprobs == [[(5, -9999.0, 0), (8, -0.1, 0)]]


def test_ranks_that_are_zero_do_not_order_anything():
    entry = {8: SimpleNamespace(logprob=-2.0, rank=0), 5: SimpleNamespace(logprob=-0.5, rank=0)}
    assert run(logprobs=2).read(output([5], [entry]), 1.0).logprobs == [[(5, -0.5, 0), (5, -0.5, 0), (8, -2.0, 0)]]


def test_the_rank_of_a_chosen_token_beyond_the_likeliest_is_kept():
    entry = {8: SimpleNamespace(logprob=-0.1, rank=1), 5: SimpleNamespace(logprob=-7.0, rank=40)}
    assert run(logprobs=1).read(output([5], [entry]), 1.0).logprobs == [[(5, -7.0, 40), (8, -0.1, 1)]]


def test_bare_numbers_are_log_probabilities_too():
    assert run(logprobs=1).read(output([5], [-0.5]), 1.0).logprobs == [[(5, -0.5, 0)]]
