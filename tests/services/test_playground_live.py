"""The live view against the real deployment: workers, rates, ways, faults, on wide and narrow pages."""

import pytest

from tests.services.playground_page import NARROW, WIDE
from tests.services.playground_servers import DOOR, URL
from tests.services.test_playground_access import violations


@pytest.fixture
def live(deployment, visit):
    page = visit(URL).open()
    page.click("#show-live")
    page.until(lambda: page.all(".worker"))
    return page


def tile(page, name):
    values = "return [...document.querySelectorAll('.tile')].map((one) => [one.children[0], one.querySelector('p')])"
    return {one.text: value.text for one, value in page.run(values)}[name]


def test_the_worker_is_shown_with_its_state_and_load(live):
    assert live.text(".worker .state") == "ready" and live.text(".worker strong") == "decode"
    live.until(lambda: "KV 0 of" in live.text(".worker-kv"))
    assert "Running" in live.text(".worker dl") and "Engine since" in live.text(".worker dl")
    assert live.text("#live-no-faults") == "None."


def test_a_request_is_counted_and_its_way_is_drawn(live):
    live.run_module(
        "const { streamChat } = await load('api.js');"
        "const messages = [{ role: 'user', content: 'What is 12 + 30?' }];"
        "const body = { model: 'tiny-chat', messages, stream: true };"
        "for await (const _ of streamChat(body, new AbortController().signal));"
    )
    live.until(lambda: "requests/s" in live.text(".flows li"))
    assert live.text(".flows .way") == "decode" and live.find(".flow-line").is_displayed()
    live.until(lambda: tile(live, "Requests ended") not in ("– a second", "0 a second"))


def plans(page):
    # At once: rows are made anew with each plan
    return page.run("return [...document.querySelectorAll('#live-plans li')].map((row) => row.innerText)")


def test_what_a_planner_decides_is_shown_with_its_reason_as_it_comes_the_newest_first(live):
    assert not live.find("#live-planner").is_displayed()  # nobody plans here
    DOOR.post("/plan", at=1_000_000.0, result="up", acts=False, text="2.5 requests/s need <b>2</b>+1")
    live.until(lambda: plans(live))
    assert live.find("#live-planner").is_displayed() and live.text("#live-planner-title") == "Planner"
    assert "More workers (advice)" in plans(live)[0] and "2.5 requests/s need <b>2</b>+1" in plans(live)[0]
    DOOR.post("/plan", at=1_000_060.0, result="hold", acts=True, text="hold: missing: no door answers")
    live.until(lambda: len(plans(live)) == 2)
    assert "Held" in plans(live)[0] and "(advice)" not in plans(live)[0]
    for number in range(10):
        DOOR.post("/plan", at=1_000_120.0 + number, result="same", acts=True, text=f"as it is, turn {number}")
    live.until(lambda: "turn 9" in plans(live)[0])
    assert len(plans(live)) == 8 and violations(live) == []


def test_it_watches_only_while_it_is_open(live):
    live.click("#show-live")
    assert live.find("#composer").is_displayed() and not live.find("#live").is_displayed()
    before = live.text("#live-status")
    live.click("#show-batches")
    live.until(lambda: live.find("#batches").is_displayed())
    assert live.run("return document.getElementById('live-status').textContent") in (before, "") or before == ""
    live.click("#show-live")
    assert not live.find("#batches").is_displayed()
    live.until(lambda: live.text("#live-status"))


def test_its_address_opens_it(deployment, visit):
    page = visit(URL).open()
    page.driver.get("about:blank")
    page.driver.get(f"{URL}#view=live")
    page.until(lambda: page.text(".worker .state") == "ready")


@pytest.mark.parametrize(("size", "theme"), [(WIDE, "light"), (NARROW, "dark")])
def test_axe_finds_no_barrier_and_nothing_goes_over_the_edge(deployment, visit, size, theme):
    page = visit(URL).open(size, theme)
    page.click("#show-live")
    page.until(lambda: page.text(".worker-kv"))
    assert violations(page) == []
    assert page.run("return document.getElementById('live').scrollWidth") <= size[0]


def test_a_lost_stream_is_taken_up_again(scripted_frontend, visit):
    page = visit(scripted_frontend.url).open()
    page.run(
        "window.fetch = ((real) => (...all) => window.isDown ? Promise.reject(new TypeError()) : real(...all))(fetch)"
    )
    page.run("window.isDown = true")
    page.click("#show-live")
    page.until(lambda: "Trying again" in page.text("#live-status"))
    page.run("window.isDown = false")
    page.until(lambda: page.text(".worker .state") == "unknown")
