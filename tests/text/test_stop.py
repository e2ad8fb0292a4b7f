from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.text.stop import StopFinder

ALPHABET = st.sampled_from("ab<")


def run(pieces, stops, include=False):
    finder = StopFinder(stops, include)
    text = "".join([finder.push(piece) for piece in pieces])
    assert finder.is_stopped == bool(finder.stop_string)
    return text + finder.flush(), finder.stop_string


def expected(text, stops, include=False):
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, ""


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.text(ALPHABET, max_size=5), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
)
def test_the_first_complete_stop_string_ends_the_text_however_it_is_cut(pieces, stops, include):
    assert run(pieces, stops, include) == expected("".join(pieces), stops, include)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.text(ALPHABET, max_size=5), max_size=12), st.text(ALPHABET, min_size=1, max_size=6))
def test_only_what_may_become_the_stop_string_is_held_back(pieces, stop):
    finder, text, out = StopFinder([stop]), "", ""
    for piece in pieces:
        text, out = text + piece, out + finder.push(piece)
        if finder.is_stopped:
            return
        held = text[len(out) :]
        longest = max(size for size in range(len(stop)) if text.endswith(stop[:size]))
        assert text.startswith(out) and len(held) == longest


def test_a_stop_string_across_pieces_is_not_leaked():
    finder = StopFinder(["</answer>"])
    assert [finder.push(piece) for piece in ("yes</", "ans", "wer", "> no")] == ["yes", "", "", ""]
    assert finder.is_stopped and finder.flush() == ""


def test_what_looked_like_a_stop_string_comes_out_when_it_is_none():
    finder = StopFinder(["</answer>"])
    assert finder.push("a </ans") == "a "
    assert finder.push("w no") == "</answ no"[:5] + "w no"


def test_text_held_at_the_end_is_given_back():
    finder = StopFinder(["</answer>"])
    assert finder.push("a </ans") + finder.flush() == "a </ans"


def test_repetitive_text_and_long_stop_strings_need_no_quadratic_work():
    finder = StopFinder(["a" * 1000 + "b"] * 16)
    text = "".join(finder.push("aaaa") for _ in range(500))  # minutes, if it were
    assert len(text) == 1000 and not finder.is_stopped


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.text(ALPHABET, max_size=4), max_size=8),
    st.lists(st.text(ALPHABET, max_size=4), max_size=8),
    st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_a_stop_string_counts_where_its_end_does(skipped, pieces, stops):
    finder, begin = StopFinder(stops), "".join(skipped)
    text = "".join([*map(finder.skip, skipped), *map(finder.push, pieces)])
    whole = begin + "".join(pieces)
    ends = [end for end in range(len(begin) + 1, len(whole) + 1) if whole[:end].endswith(tuple(stops))]
    stop = max((stop for stop in stops if ends and whole[: ends[0]].endswith(stop)), key=len, default="")
    assert finder.stop_string == stop
    assert text + finder.flush() == (whole[: ends[0] - len(stop)] if ends else whole)
