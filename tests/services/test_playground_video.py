"""Videos on the page: a prompt, progress, and a player, with the trained sample model."""

from __future__ import annotations

import json

import pytest

from tests.server.openai_served import five_ports, served

PORTS = five_ports()
URL = f"http://127.0.0.1:{PORTS['openai']}/"


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    override = json.dumps({"video": {"folder": str(folder)}})
    with served("recipes/tiny-video", folder / "log", "--override", override, ports=PORTS):
        yield


@pytest.fixture
def page(videos, visit):
    return visit(URL).open()


def ask(page, **fields):
    for name, value in fields.items():
        page.find(f"#video-{name}").clear()
        page.find(f"#video-{name}").send_keys(value)
    page.find("#video-make").click()


def test_a_model_that_makes_videos_has_a_view_of_its_own(page):
    assert page.find("#video").is_displayed() and not page.find("#composer").is_displayed()


def test_a_video_is_made_with_progress_and_played(page):
    ask(page, prompt="a red circle moving right", size="64x64", seconds="2", seed="7")
    page.until(lambda: page.find("#video-progress").is_displayed())
    page.until(lambda: page.text("#video-status").startswith("Step"))
    page.until(lambda: page.find("#video-result").is_displayed())
    assert page.text("#video-status").startswith("16 frames, 64x64, 8 a second, seed 7")
    page.until(lambda: page.run("return document.querySelector('#video-player').readyState") >= 2)
    assert page.run("return document.querySelector('#video-player').videoWidth") == 64
    assert abs(page.run("return document.querySelector('#video-player').duration") - 2) < 0.2


def test_a_video_can_be_stopped_and_another_made(page):
    ask(page, prompt="a blue square", seconds="8")
    page.until(lambda: page.text("#video-status").startswith("Step"))
    page.find("#video-make").click()
    page.until(lambda: page.text("#video-status") == "Stopped.")
    assert not page.find("#video-result").is_displayed()
    ask(page, prompt="a blue square", seconds="1")
    page.until(lambda: page.find("#video-result").is_displayed())
    assert page.text("#video-status").startswith("8 frames")


def test_a_refusal_is_shown_in_the_server_s_words(page):
    ask(page, prompt="a cat", size="100x100")
    page.until(lambda: "multiples of 16" in page.text("#video-error"))
    assert not page.find("#video-progress").is_displayed()
