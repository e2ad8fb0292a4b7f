"""Pictures in the playground's chat: a real Chromium, the real frontend, tritonserver with tiny-vlm."""

from __future__ import annotations

import base64
import json
import random

import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys

from models.training.picture_world import dialogues, png
from tests.server.openai_served import five_ports, served

PORTS = five_ports()
URL = f"http://127.0.0.1:{PORTS['openai']}/"
SENT = """
    window.sent = [];
    const plain = window.fetch;
    window.fetch = (url, options) => {
      if (options?.body) window.sent.push(options.body);
      return plain(url, options);
    };
"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    with served("recipes/tiny-vlm-agg", tmp_path_factory.mktemp("pictures") / "log", ports=PORTS):
        yield


@pytest.fixture
def page(seeing, visit):
    opened = visit(URL).open()
    opened.run(SENT)
    return opened


def asked_about(kind="colour"):
    return next(dialogues("playground", 1, True, kind))


def picture_of(dialogue, at=0):
    return png(dialogue.pictures()[at])


@pytest.fixture
def drawn(tmp_path):
    """A file with the picture that `asked_about()` asks about."""
    path = tmp_path / "drawn.png"
    path.write_bytes(picture_of(asked_about()))
    return path


def last_content(page):
    """Return the content of the last user message that was sent."""
    messages = json.loads(page.run("return window.sent.at(-1)"))["messages"]
    return [message for message in messages if message["role"] == "user"][-1]["content"]


def test_a_question_about_an_attached_picture_is_answered_rightly(page, drawn):
    turn = asked_about().turns[0]
    page.attach(drawn)
    assert page.asked(turn.question) == turn.answer
    picture, text = last_content(page)
    assert text == {"type": "text", "text": turn.question}
    encoded = base64.b64encode(drawn.read_bytes()).decode()
    assert picture == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def test_the_conversation_shows_the_picture_and_the_composer_no_longer(page, drawn):
    page.attach(drawn)
    page.asked("Describe the picture.")
    assert page.find(".turn.user .picture").get_attribute("alt") == "Attached picture: drawn.png"
    assert page.run("return document.querySelector('.turn.user .picture').naturalWidth") > 80
    assert not page.all(".composer .thumbnail")


def test_the_next_question_is_about_the_same_picture(page, drawn):
    dialogue = asked_about()
    page.attach(drawn)
    first = page.asked(dialogue.turns[0].question)
    page.asked("How many objects are there?", 2)
    messages = json.loads(page.run("return window.sent.at(-1)"))["messages"]
    assert [type(message["content"]) for message in messages] == [list, str, str] and first == dialogue.turns[0].answer
    assert page.text(".answer:last-child .content") == str(len(dialogue.scenes[0]))


def test_two_pictures_go_along_in_their_order(page, tmp_path):
    dialogue = asked_about("two")
    paths = [tmp_path / "first.png", tmp_path / "second.png"]
    for at, path in enumerate(paths):
        path.write_bytes(picture_of(dialogue, at))
    page.attach(*paths)
    page.asked(dialogue.turns[0].question)
    urls = [part["image_url"]["url"] for part in last_content(page)[:2]]
    assert [base64.b64decode(url.split(",")[1]) for url in urls] == [path.read_bytes() for path in paths]


def test_a_removed_picture_is_not_sent(page, drawn):
    page.attach(drawn)
    page.click("[aria-label='Remove picture: drawn.png']")
    assert not page.all(".composer .thumbnail") and page.focused == "prompt"
    page.asked("Who are you?")
    assert last_content(page) == "Who are you?"


def test_a_picture_is_pasted(page, drawn):
    page.click("#prompt")
    page.paste(("image.png", "image/png", drawn.read_bytes()))
    page.until(lambda: page.all(".composer .thumbnail"))
    assert page.asked(asked_about().turns[0].question) == asked_about().turns[0].answer


def test_a_picture_is_dropped_anywhere_on_the_page(page, drawn):
    page.drop("#thread", ("dropped.png", "image/png", drawn.read_bytes()))
    page.until(lambda: page.all(".composer .thumbnail"))
    assert page.focused == "prompt" and not page.all(".dropping")
    assert page.asked(asked_about().turns[0].question) == asked_about().turns[0].answer


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_other_kinds_are_told_by_their_bytes(page, tmp_path, kind):
    path = tmp_path / "named.png"
    asked_about().pictures()[0].save(path, kind)
    page.attach(path)
    page.asked("Describe the picture.")
    assert str(last_content(page)[0]).startswith(
        f"{{'type': 'image_url', 'image_url': {{'url': 'data:image/{kind.lower()};"
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"GIF89a" + bytes(20), "a.png is not a PNG, JPEG or WebP picture. Convert it to one of these."),
        (b"", "a.png is not a PNG, JPEG or WebP picture. Convert it to one of these."),
        (b"\x89PNG\r\n\x1a\n" + bytes(20), "a.png is damaged: the browser can't show it. Attach another file."),
        (bytes(11 << 20), "a.png has 11.0 MB; the limit is 10 MB. Make it smaller."),
    ],
    ids=["gif", "empty", "damaged", "large"],
)
def test_what_can_t_be_sent_is_said_and_the_others_are_taken(page, tmp_path, drawn, content, problem):
    wrong = tmp_path / "a.png"
    wrong.write_bytes(content)
    page.find(".composer .tray .file").send_keys(f"{wrong}\n{drawn}")
    page.until(lambda: page.text(".composer .tray .note") == problem)
    assert [image.get_attribute("title") for image in page.all(".composer .picture")] == ["drawn.png"]


def test_a_picture_is_attached_removed_and_sent_by_keyboard_alone(page, drawn):
    page.run("document.querySelector('.tray .file').addEventListener('click', () => (window.hasAsked = true))")
    page.press(Keys.SHIFT + Keys.TAB)
    assert page.focused == "Attach pictures"
    page.press(Keys.ENTER)
    assert page.run("return window.hasAsked")  # what follows is the system's dialog
    page.attach(drawn, drawn)
    assert page.focused == "prompt"
    page.press(Keys.SHIFT + Keys.TAB, Keys.SHIFT + Keys.TAB)
    assert page.focused == "Remove picture: drawn.png"
    page.press(Keys.SPACE)
    assert page.focused == "Remove picture: drawn.png" and len(page.all(".composer .thumbnail")) == 1
    page.press(Keys.TAB, Keys.TAB)
    assert page.focused == "prompt"
    assert page.asked(asked_about().turns[0].question) == asked_about().turns[0].answer


def test_editing_and_asking_again_keep_the_picture(page, drawn):
    turn = asked_about().turns[0]
    page.attach(drawn)
    page.asked("Describe the picture.")
    page.click("[aria-label='Edit and send again']")
    page.find(".editor textarea").clear()
    page.find(".editor textarea").send_keys(turn.question + Keys.ENTER)
    page.until(lambda: page.text(".answer .content") == turn.answer)
    page.answered()
    page.click(".answer .retry")
    page.until(lambda: page.run("return window.sent.length") == 3)
    assert page.answered().find_element("css selector", ".content").text == turn.answer


def test_a_picture_can_be_removed_while_editing(page, drawn):
    page.attach(drawn)
    page.asked("Describe the picture.")
    page.click("[aria-label='Edit and send again']")
    page.click(".editor .remove")
    page.find(".editor textarea").clear()
    page.find(".editor textarea").send_keys("Who are you?" + Keys.ENTER)
    page.until(lambda: page.text(".answer .content") == "I am tiny-vlm.")
    assert last_content(page) == "Who are you?"


def test_a_picture_alone_is_a_message(page, drawn):
    page.attach(drawn)
    page.press(Keys.ENTER)
    page.answered()
    assert [part["type"] for part in last_content(page)] == ["image_url"] and not page.all(".error")


def test_a_reload_keeps_pictures(page, drawn):
    page.attach(drawn)
    answer = page.asked("Describe the picture.")
    page.reload()
    assert page.find(".turn.user .picture").get_attribute("title") == "drawn.png"
    page.run(SENT)
    page.click(".answer .retry")
    page.until(lambda: page.run("return window.sent.length") == 1)
    assert page.answered().find_element("css selector", ".content").text == answer


def test_pictures_beyond_the_storage_are_lost_by_a_reload_and_that_is_said(page, tmp_path):
    page.run("sessionStorage.setItem('filler', 'x'.repeat(5 * 1024 * 1024 - 20000))")
    path = tmp_path / "noise.png"
    Image.frombytes("RGB", (150, 150), random.Random(1).randbytes(150 * 150 * 3)).save(path)
    page.attach(path)
    page.asked("Describe the picture.")
    note = "One picture is too large to be kept when this page is loaded again."
    page.until(lambda: page.text(".composer .tray .note") == note)
    page.reload()
    assert not page.all(".turn.user .picture") and page.text(".turn.user .bubble") == "Describe the picture."
    lost = "A picture of this message did not fit into the tab's storage and is no longer sent."
    assert page.text(".turn.user .notice") == lost


def test_code_shows_pictures_short_and_copies_them_whole(page, drawn):
    page.attach(drawn)
    page.run("navigator.clipboard.writeText = async (text) => void (window.copied = text)")
    page.click("#show-code")
    shown = page.text("#code-text code")
    assert "@- <<'END'" in shown and "characters)" in shown and len(shown) < 1000
    page.click("#code-text .copy")
    page.until(lambda: page.run("return window.copied"))
    body = page.run("return window.copied").split("<<'END'\n")[1].removesuffix("\nEND")
    url = json.loads(body)["messages"][-1]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.split(",")[1]) == drawn.read_bytes()


def test_the_server_s_words_are_shown_when_it_refuses_a_picture(page, drawn):
    page.attach(*[drawn] * 17)
    page.ask("What is this?")
    page.until(lambda: page.text(".answer .error-text"))
    assert "more than 16 images (media.max_images); send fewer" in page.text(".answer .error-text")
