"""What the page knows of the models that it offers: which take pictures is said before anything is sent."""

import json

import pytest
from selenium.webdriver.common.keys import Keys

from models.training.picture_world import dialogues, png
from tests.services.test_playground_scripted import say

TEXT_ONLY = "scripted reads text only. Choose other, or go on without pictures."


@pytest.fixture
def page(scripted, visit):
    scripted.pieces = say("ok")
    return visit(scripted.url).open()


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "drawn.png"
    path.write_bytes(png(next(dialogues("playground", 1, True, "colour")).pictures()[0]))
    return path


def note(page):
    return page.text(".composer .tray .note")


def choose_model(page, name):
    page.find("#model").send_keys(name)
    assert page.find("#model").get_property("value") == name


def sent(scripted):
    return [json.loads(request) for request in scripted.requests]


def test_pictures_can_be_attached_where_the_model_takes_them(page):
    assert not page.find(".composer .attach").is_displayed()
    choose_model(page, "other")
    assert page.find(".composer .attach").is_displayed()


def test_a_model_of_text_alone_takes_no_picture_and_says_which_does(page, picture):
    file = ("drawn.png", "image/png", picture.read_bytes())
    page.click("#prompt")
    page.paste(file)
    assert note(page) == TEXT_ONLY
    page.click("#new-chat")
    assert note(page) == ""
    page.drop("#thread", file)
    assert note(page) == TEXT_ONLY and not page.all(".composer .thumbnail")


def test_a_picture_is_not_sent_to_a_model_of_text_alone_that_is_chosen_later(page, picture, scripted):
    choose_model(page, "other")
    page.attach(picture)
    choose_model(page, "scripted")
    assert note(page) == TEXT_ONLY
    page.ask("What is this?")
    assert note(page) == TEXT_ONLY and not page.all(".turn") and scripted.requests == []
    assert page.find("#prompt").get_property("value") == "What is this?"
    page.click(".composer .remove")
    assert note(page) == "" and page.asked("") == "ok"
    assert [type(one["messages"][-1]["content"]) for one in sent(scripted)] == [str]


def test_a_conversation_with_pictures_goes_on_with_a_model_that_takes_them(page, picture, scripted):
    choose_model(page, "other")
    page.attach(picture)
    page.asked("What is this?")
    choose_model(page, "scripted")
    assert note(page) == TEXT_ONLY
    page.ask("And now?")
    page.click(".answer .retry")
    assert len(scripted.requests) == 1 and page.all(".answer")[0].text.startswith("ok")
    choose_model(page, "other")
    assert note(page) == ""
    page.asked("", 2)
    assert [one["model"] for one in sent(scripted)] == ["other", "other"]


def test_an_edit_without_the_picture_goes_to_a_model_of_text_alone(page, picture, scripted):
    choose_model(page, "other")
    page.attach(picture)
    page.asked("What is this?")
    choose_model(page, "scripted")
    page.click(".turn.user .edit")
    page.click(".editor textarea")
    page.press(Keys.ENTER)
    assert page.all(".editor") and note(page) == TEXT_ONLY and len(scripted.requests) == 1
    page.click(".editor .remove")
    page.click(".editor textarea")
    page.press(Keys.ENTER)
    page.until(lambda: len(scripted.requests) == 2)
    page.answered()
    assert note(page) == "" and sent(scripted)[1]["messages"] == [{"role": "user", "content": "What is this?"}]
