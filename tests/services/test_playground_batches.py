"""Batches on the page, run by the real deployment: progress, results, what is wrong with a file."""

import json

import pytest

from tests.services.test_playground_access import violations


@pytest.fixture
def batches(page):
    page.click("#show-batches")
    return page


@pytest.fixture
def choose(batches, tmp_path):
    def start(*lines):
        path = tmp_path / "requests.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        batches.find("#batch-file").send_keys(str(path))
        batches.click("#batch-start")

    return start


def line(number, **fields):
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "What is 12 + 30?"}], **fields}
    return json.dumps({"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


def status(page, wanted):
    return page.until(lambda: page.text(".batch:first-child .batch-status") == wanted)


def test_the_page_and_the_button_that_leads_to_it_have_a_name(batches):
    assert batches.text("#batches h2") == batches.text("#show-batches") == "Batches"


def test_an_example_runs_to_its_end_and_its_answers_are_saved(batches, tmp_path):
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    batches.driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    batches.click("#batch-example")
    assert status(batches, "completed") and batches.text(".batch:first-child .batch-counts") == "4 of 4"
    bar = batches.find(".batch:first-child progress")
    assert (bar.get_property("value"), bar.get_property("max")) == (4, 4)
    batches.click(".batch:first-child .row button")
    saved = batches.until(lambda: next(tmp_path.glob("*_output.jsonl"), None))
    answers = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, saved.read_text().splitlines())}
    assert answers["example-1"]["choices"][0]["message"]["content"] == "42"


def test_progress_is_shown_and_the_rest_can_be_cancelled(batches, choose):
    endless = {"bireme": {"ignore_eos": True}, "max_tokens": 900}
    choose(line(1), *(line(number, **endless) for number in range(2, 500)))
    batches.until(lambda: batches.text(".batch:first-child .batch-counts").startswith("1 of 499"))
    batches.click(".batch:first-child .row button")
    assert status(batches, "cancelled")
    assert batches.all(".batch:first-child .row button")[-1].text == "Save errors"


def test_a_wrong_line_is_named_and_nothing_runs(batches, choose):
    choose(line(1), line(2, model="nobody"))
    assert status(batches, "failed")
    assert "line 2: The model `nobody` does not exist" in batches.text(".batch:first-child .problem")


def test_a_file_that_holds_no_requests_is_not_uploaded(batches, choose):
    choose("custom_id,method")
    batches.until(lambda: "its first line is no request" in batches.text("#batch-error"))


def test_batches_are_there_again_after_a_reload_and_the_chat_after_them(batches):
    batches.click("#batch-example")
    assert status(batches, "completed")
    shown = len(batches.all(".batch"))
    assert not batches.find("#composer").is_displayed() and violations(batches) == []
    batches.reload()
    assert batches.find("#composer").is_displayed()
    batches.click("#show-batches")
    batches.until(lambda: len(batches.all(".batch")) == shown)
    batches.click("#show-batches")
    assert batches.find("#composer").is_displayed() and not batches.find("#batches").is_displayed()
