"""A request's timeline on the page, of the real deployment: by the answer's clock, by an id, by an address."""

import pytest

from tests.services.playground_page import NARROW, WIDE
from tests.services.playground_servers import URL
from tests.services.test_playground_access import violations


@pytest.fixture
def shown(page):
    page.asked("What is 12 + 30?")
    page.click(".answer .foot a")
    page.until(lambda: page.text(".timeline-verdict"))
    return page


def test_the_clock_of_an_answer_leads_to_its_timeline(shown):
    assert " took " in shown.text(".timeline-verdict") and "tiny-chat" in shown.text("#timeline-summary")
    labels = shown.run("return [...document.querySelectorAll('.row-label')].map((label) => label.textContent)")
    assert labels == ["tokenizing", "placement", "decode", "tokens", "to the client"]
    assert len(shown.all("#timeline-causes li")) > 4 and "decode ✓" in shown.text(".placement table")
    assert "generation" in shown.run("return document.getElementById('timeline-drawing').textContent")


def test_the_chat_is_there_again_and_the_clock_works_twice(shown):
    shown.click("#show-live")
    shown.click("#show-live")
    assert shown.find("#composer").is_displayed() and shown.text(".answer .content") == "42"
    shown.click(".answer .foot a")
    shown.until(lambda: shown.find("#timeline").is_displayed())


def test_an_id_that_is_none_is_told(page):
    page.click("#show-live")
    page.click("#show-timeline")
    page.find("#timeline-id").send_keys("none\n")
    page.until(lambda: "no timeline of a request of yours" in page.text("#timeline-error"))
    assert not page.find("#timeline-result").is_displayed()


@pytest.mark.parametrize(("size", "theme"), [(WIDE, "light"), (NARROW, "dark")])
def test_axe_finds_no_barrier_and_nothing_goes_over_the_edge(deployment, visit, size, theme):
    page = visit(URL).open(size, theme)
    page.asked("What is 12 + 30?")
    page.click(".answer .foot a")
    page.until(lambda: page.text(".timeline-verdict"))
    assert violations(page) == []
    assert page.run("return document.getElementById('timeline').scrollWidth") <= size[0]
