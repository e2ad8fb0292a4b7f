"""Conversations that the real deployment keeps: opened again, gone on with, deleted."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from selenium.webdriver.common.keys import Keys

from tests.services.playground_servers import URL


@pytest.fixture
def page(page):
    page.run("document.querySelector('#history').open = true; document.getElementById('keep').click()")
    return page


def code_of(page, kind):
    page.click("#show-code")
    page.click(f"input[value={kind}]")
    text = page.find("#code-text code").get_property("textContent")
    page.press(Keys.ESCAPE)
    return text


def request_of(page):
    return json.loads(code_of(page, "json"))


def reopen(page, number):
    page.click("#new-chat")
    page.run("document.querySelector('#history').open = true")
    page.click(".kept")
    page.until(lambda: len(page.all(".turn.user")) == number)


def status_of(response):
    try:
        return urllib.request.urlopen(f"{URL}v1/responses/{response}").status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_kept_conversation_is_opened_again_and_goes_on_from_its_last_answer(page):
    page.set("system", "End each answer with plam.")
    assert page.asked("What colour is the sky?") == "blue plam"
    assert page.asked("What colour is grass?", 2) == "green plam"
    page.reload()
    reopen(page, 2)
    assert [answer.text for answer in page.all(".answer .content")] == ["blue plam", "green plam"]
    sent = request_of(page)
    assert sent["previous_response_id"].startswith("resp_") and "messages" not in sent
    assert [item["content"] for item in sent["input"]] == ["Hello!"]
    assert page.asked("What colour is snow?", 3) == "white plam"
    assert [entry.text for entry in page.all(".kept")] == ["What colour is the sky?"]


def test_an_edited_message_goes_on_from_the_answer_before_it(page):
    page.asked("What is 12 + 30?")
    first = request_of(page)["previous_response_id"]
    page.asked("What is 1 + 10?", 2)
    page.press(Keys.ARROW_UP, Keys.CONTROL + "a", "What is 20 + 30?", Keys.ENTER)
    assert page.answered(2).text.startswith("50")
    assert len(page.all(".kept")) == 2 and request_of(page)["previous_response_id"] != first


def test_the_next_request_as_a_program_goes_on_from_the_kept_answer(page):
    page.set("system", "End each answer with plam.")
    page.asked("What colour is the sky?")
    page.find("#prompt").send_keys("What colour is grass?")
    command = [sys.executable, "-c", code_of(page, "python")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("green plam", "")
    assert "/v1/responses" in code_of(page, "curl")


def test_calls_their_results_and_thoughts_come_back(page):
    page.example("Call a tool")
    page.answered()
    page.until(lambda: page.focused.startswith("result-call_"))
    page.press('{"degrees": 3, "sky": "sunny"}', Keys.ENTER)
    assert "sunny in Oslo" in page.answered(2).text
    reopen(page, 1)
    assert page.text(".call-name") == "get_weather" and "sunny in Oslo" in page.all(".answer")[-1].text
    page.click("#new-chat")
    page.example("Think first")
    page.answered()
    reopen(page, 1)
    page.click(".reasoning summary")
    assert page.text(".reasoning .prose").endswith("50 + 12 = 62.") and page.text(".answer .content") == "62"


def test_a_deleted_conversation_is_gone_from_the_server_too(page):
    page.asked("What is 12 + 30?")
    page.asked("What is 1 + 10?", 2)
    last = request_of(page)["previous_response_id"]
    assert status_of(last) == 200
    page.click("#kept-list .icon-only")
    page.until(lambda: not page.all(".kept"))
    assert status_of(last) == 404 and page.find("#kept-none").is_displayed()


def test_a_conversation_that_the_server_has_lost_can_be_removed_from_the_list(page):
    page.asked("What is 12 + 30?")
    last = request_of(page)["previous_response_id"]
    urllib.request.urlopen(urllib.request.Request(f"{URL}v1/responses/{last}", method="DELETE")).close()
    page.click(".kept")
    page.until(lambda: "does not exist; it may have been deleted" in page.text("#kept-problem"))
    page.click("#kept-problem button")
    assert not page.all(".kept") and page.text("#kept-problem") == ""
