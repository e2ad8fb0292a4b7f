"""What the playground says when something is wrong: keys, refusals, a server that is gone."""

import os
import re
import signal
import subprocess
import sys

import pytest
from selenium.webdriver.common.keys import Keys

from tests.services.playground_servers import further_frontend

NEVER_ENDING = '{"bireme": {"ignore_eos": true}}'


@pytest.fixture
def keyed(deployment, tmp_path):
    """A frontend that asks for keys: (address, key)."""
    made = subprocess.run(
        [sys.executable, "tools/make_api_key.py", "tester"], capture_output=True, text=True, check=True
    )
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n{made.stdout}")
    with further_frontend(tmp_path / "log", "--api-keys", str(path)) as (url, _):
        yield url, re.search(r"br-\S+", made.stderr)[0]


def test_with_keys_on_the_page_asks_for_one_and_keeps_it_for_the_tab(keyed, visit):
    url, key = keyed
    page = visit(url).open(wait=False)
    page.until(lambda: page.find("#key-dialog").is_displayed())
    page.press("br-wrong", Keys.ENTER)
    assert "not known" in page.until(lambda: page.text("#key-problem"))
    page.press(key, Keys.ENTER)
    page.until(lambda: page.find("#model").is_enabled())
    assert page.asked("What is 12 + 30?") == "42"
    assert page.run("return Object.values(localStorage).join()").find(key) < 0
    page.reload()


def test_a_key_that_is_forgotten_is_asked_for_again(keyed, visit):
    url, key = keyed
    page = visit(url).open(wait=False)
    page.press(key, Keys.ENTER)
    page.until(lambda: page.find("#model").is_enabled())
    page.run("sessionStorage.clear()")
    page.ask("What is 12 + 30?")
    page.answered()
    assert "401" in page.text(".answer .error .note")
    next(button for button in page.all(".answer .error button") if button.text == "Enter a key").click()
    page.press(key, Keys.ENTER)
    page.until(lambda: not page.find("#key-dialog").is_displayed())
    next(button for button in page.all(".answer .error button") if button.text == "Try again").click()
    assert page.answered(1).text.startswith("42")


@pytest.mark.flaky(reruns=1)
def test_a_server_that_goes_away_in_mid_answer_is_told(deployment, visit, tmp_path):
    with further_frontend(tmp_path / "log") as (url, process):
        page = visit(url).open()
        page.set("extra", NEVER_ENDING)
        page.ask("Count from 1 to 9.")
        page.until(lambda: page.text(".answer .content"))
        os.kill(process.pid, signal.SIGKILL)
        page.answered()
        assert "connection ended" in page.text(".answer .error") and page.text(".answer .content")
        page.click(".answer .error button")
        assert "can't be reached" in page.until(lambda: page.answered(1).find_element("css selector", ".error").text)


def test_what_the_server_refuses_is_shown_in_its_words(page):
    page.set("extra", '{"top_logprobs": 3}')
    page.ask("What is 12 + 30?")
    page.answered()
    assert "top_logprobs: only with logprobs true" in page.text(".answer .error") and "400" in page.text(
        ".answer .error .note"
    )


def test_a_key_that_is_no_operators_may_not_see_workers(keyed, visit):
    url, key = keyed
    page = visit(url).open(wait=False)
    page.press(key, Keys.ENTER)
    page.until(lambda: page.find("#model").is_enabled())
    page.click("#show-live")
    page.until(lambda: "operator: true" in page.text("#live-error"))
    assert page.all(".worker") == [] and "Enter a key" in page.text("#live-error")
