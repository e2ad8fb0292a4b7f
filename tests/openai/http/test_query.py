"""How many a page is to have: a short number within its range, and nothing else."""

import pytest

from bireme.errors import RequestError
from bireme.openai.http.query import limit_of


@pytest.mark.parametrize(("limit", "count"), [("1", 1), ("100", 100), ("0020", 20)])
def test_a_limit_is_the_number_that_was_sent(limit, count):
    assert limit_of({"limit": limit}, 20, 100) == count


def test_without_a_limit_a_page_has_the_usual_number():
    assert limit_of({}, 20, 100) == 20


WRONG_LIMITS = ["", "0", "101", "-1", "+1", " 1", "1_0", "1.0", "\u0661", "0000001099999", "0" * 30 + "1", "1" * 5000]


@pytest.mark.parametrize("limit", WRONG_LIMITS, ids=lambda limit: repr(limit[:20]))
def test_a_limit_that_is_no_short_number_in_the_range_is_refused(limit):
    with pytest.raises(RequestError) as refusal:
        limit_of({"limit": limit}, 20, 100)
    assert str(refusal.value) == f"limit: {limit[:20]}; the range is 1 to 100"
