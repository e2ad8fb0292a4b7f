"""Conversations in the playground: a real Chromium, the real frontend, tritonserver with tiny-chat."""

import contextlib
import json
import os
import re
import signal
import time

from selenium.webdriver.common.keys import Keys

from tests.server.openai_served import engine_of, gauge, wait_for
from tests.services.playground_servers import PORTS

STORY = "Continue the story: Once upon a time, Rosa lost a red kite in the forest."
NEVER_ENDING = '{"bireme": {"ignore_eos": true}}'  # for two seconds: then the model's context is full
RECORD = """
    const seen = new Set();
    window.seen = seen;
    new MutationObserver(() => {
      const content = document.querySelector(".answer:last-child .content");
      if (content?.textContent) seen.add(content.textContent);
    }).observe(document.getElementById("thread"), {subtree: true, childList: true, characterData: true});
"""


def running():
    return gauge("bireme_requests_running", PORTS["metrics"])


def cancelled():
    return gauge("bireme_cancellations_total", PORTS["metrics"])


@contextlib.contextmanager
def unfinished_answer(page, deployment, shown=".answer:last-child .content"):
    """An answer shows this, and its engine stands still, so that it can't end before a busy browser gets to it."""
    engine = engine_of(deployment)
    os.kill(engine, signal.SIGSTOP)
    try:
        page.ask("Count from 1 to 9.")
        while not page.text(shown):
            os.kill(engine, signal.SIGCONT)
            time.sleep(0.05)
            os.kill(engine, signal.SIGSTOP)
            time.sleep(0.2)
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


def test_a_sum_is_answered_rightly(page):
    assert page.asked("What is 12 + 30?") == "42"


def test_nothing_that_was_shown_of_an_answer_changes_later(page):
    page.run(RECORD)
    text = page.asked(STORY)
    steps = page.run("return [...window.seen]")
    assert "kite" in text and "kite" in steps[-1]
    assert all(later.startswith(earlier) for earlier, later in zip(steps, steps[1:], strict=False))


def test_time_to_first_token_rate_and_tokens_are_shown(page):
    page.asked(STORY)
    assert re.fullmatch(r"TTFT [\d.]+ m?s", page.text(".answer .ttft"))
    assert re.fullmatch(r"[\d.,]+ tokens/s", page.text(".answer .rate"))
    assert int(re.match(r"(\d+) tokens", page.text(".answer .tokens"))[1]) > 10
    assert re.match(r"\d+ prompt", page.text(".answer .prompt-tokens"))
    assert re.fullmatch(r"\d+ of 1,024 tokens of context", page.until(lambda: page.text("#context")))


def test_the_rate_is_shown_while_an_answer_comes(page, deployment):
    page.set("extra", NEVER_ENDING)
    with unfinished_answer(page, deployment, ".answer.streaming .rate"):
        assert page.text(".answer.streaming .rate").startswith("≈")
        page.press(Keys.ESCAPE)
        page.answered()


def test_details_name_the_worker_and_tokens_from_the_cache(page):
    question = "Say " + "oar " * 60
    page.asked(question)
    page.click("#new-chat")
    page.asked(question)
    page.click(".answer .stats summary")
    details = page.text(".answer dl")
    assert re.search(r"Decode\n[\d.]+ m?s on decode", details)
    assert int(re.search(r"of these cached\n(\d+)", details)[1]) >= 32
    assert re.search(r"\d+ prompt, \d+ cached", page.text(".answer .prompt-tokens"))


def test_stop_frees_the_engine_and_keeps_what_was_said(page, deployment):
    before = cancelled()
    page.set("extra", NEVER_ENDING)
    with unfinished_answer(page, deployment):
        page.click("#send")
        assert "Stopped." in page.answered().text and page.text(".answer .content")
    wait_for(lambda: running() == 0 and cancelled() == before + 1, 30)


def test_escape_a_new_chat_and_leaving_the_page_stop_an_answer(page, deployment):
    page.set("extra", NEVER_ENDING)
    leave = [lambda: page.press(Keys.ESCAPE), lambda: page.click("#new-chat"), lambda: page.driver.get("about:blank")]
    before = cancelled()
    for number, stop in enumerate(leave, 1):
        with unfinished_answer(page, deployment):
            stop()
        wait_for(lambda: running() == 0 and cancelled() == before + number, 30)  # noqa: B023


def test_a_conversation_of_several_turns_remembers_the_first(page):
    page.set("system", "End each answer with plam.")
    assert page.asked("What colour is the sky?") == "blue plam"
    assert page.asked("What colour is grass?", 2) == "green plam"
    page.click("#show-code")
    page.click("input[value=json]")
    sent = json.loads(page.find("#code-text code").get_property("textContent"))
    roles = [message["role"] for message in sent["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert sent["messages"][2]["content"] == "blue plam"


def test_trying_again_replaces_the_last_answer_only(page):
    page.asked("What is 12 + 30?")
    page.asked("What is 1 + 10?", 2)
    assert len([button for button in page.all(".retry") if button.is_displayed()]) == 1
    first, second = page.all(".answer")
    page.all(".retry")[-1].click()
    again = page.answered(2)
    assert again.text.startswith("11") and again != second and page.all(".answer")[0] == first


def test_an_edited_message_is_answered_anew_without_what_followed(page):
    page.asked("What is 12 + 30?")
    page.asked("What is 1 + 10?", 2)
    page.run("document.querySelector('.turn.user .edit').click()")
    area = page.find(".editor textarea")
    assert area.get_property("value") == "What is 12 + 30?"
    area.send_keys(Keys.CONTROL + "a")
    area.send_keys("What is 20 + 30?" + Keys.ENTER)
    assert page.answered(1).text.startswith("50")


def test_the_arrow_edits_the_last_message_and_escape_leaves_it(page):
    page.asked("What is 12 + 30?")
    page.press(Keys.ARROW_UP)
    assert page.focused == "Edit the message"
    page.press(Keys.ESCAPE)
    assert page.text(".bubble") == "What is 12 + 30?" and not page.all(".editor")


def test_the_models_are_listed(page):
    assert [option.text for option in page.all("#model option")] == ["tiny-chat"]


def test_reasoning_is_shown_apart_and_closes_when_the_answer_begins(page):
    page.example("Think first")
    page.answered()
    assert page.text(".answer .content") == "62"
    assert page.text(".reasoning summary").startswith("Thought for")
    assert not page.find(".reasoning .prose").is_displayed()
    page.click(".reasoning summary")
    assert page.text(".reasoning .prose") == "20 + 30 = 50. 7 + 5 = 12. 50 + 12 = 62."


def test_a_schema_gives_json_that_fits_it(page):
    page.example("Answer by a schema")
    page.answered()
    assert json.loads(page.text(".answer .content code")) == {"name": "Ada", "age": 30}


def test_any_json_can_be_asked_for(page):
    page.set("format", "json_object")
    page.ask("The point is at x 4 and y 9. Give me this as JSON: x, y.")
    page.answered()
    assert json.loads(page.text(".answer .content code")) == {"x": 4, "y": 9}


def test_a_tool_is_called_and_the_model_goes_on_with_its_result(page):
    page.example("Call a tool")
    page.answered()
    assert page.text(".call-name") == "get_weather"
    assert json.loads(page.text(".call code:not(.call-name)")) == {"city": "Oslo"}
    page.until(lambda: page.focused.startswith("result-call_"))
    page.press('{"degrees": 3, "sky": "sunny"}', Keys.ENTER)
    assert page.answered(2).text.startswith("It is sunny in Oslo, 3 degrees.")


def test_a_message_waits_until_the_tools_result_is_there(page):
    page.example("Call a tool")
    page.answered()
    page.ask("And in Paris?")
    assert page.focused.startswith("result-call_") and len(page.all(".turn.user")) == 1
    page.click(".send-results")
    assert page.find(".call textarea").get_attribute("aria-invalid") == "true"


def test_sampling_settings_reach_the_engine(page):
    page.set("max_completion_tokens", "2")
    page.ask("Count from 1 to 9.")
    assert "Cut off" in page.answered().text and page.text(".answer .tokens") == "2 tokens"
    page.click("#new-chat")
    page.set("max_completion_tokens", "")
    page.set("stop", "3")
    assert "3" not in page.asked("Count from 1 to 9.")


def test_a_seed_repeats_an_answer(page):
    page.set("temperature", "1.6")
    page.set("seed", "7")
    page.set("max_completion_tokens", "24")
    first = page.asked(STORY)
    page.click("#new-chat")
    assert page.asked(STORY) == first


def test_a_value_out_of_range_is_not_sent_and_gets_the_focus(page):
    page.set("temperature", "9")
    page.ask("What is 12 + 30?")
    assert page.focused == "temperature" and page.text("#temperature-note") == "Enter 0 to 2"
    assert not page.all(".turn") and page.find("#prompt").get_property("value") == "What is 12 + 30?"


def test_settings_are_remembered_and_can_be_reset(page):
    page.set("temperature", "0.7")
    page.reload()
    assert page.find("#temperature").get_property("value") == "0.7"
    page.click("#reset")
    assert page.find("#temperature").get_property("value") == ""
