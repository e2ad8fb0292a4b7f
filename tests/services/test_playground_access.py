"""The playground for everybody: by keyboard alone, for screen readers, in light and dark, on a narrow page."""

import pytest
from axe_core_python.selenium import Axe
from selenium.webdriver.common.keys import Keys

from tests.services.playground_page import NARROW, WIDE
from tests.services.playground_servers import URL

FROM_THE_TOP = (
    "const top = document.createElement('a'); top.tabIndex = 0; document.body.prepend(top); top.focus(); top.remove()"
)
VISIBLE = "const box = arguments[0].getBoundingClientRect(); return box.width > 0 && box.height > 0"


def violations(page):
    """Return what axe-core finds against WCAG 2.1 A and AA and its best practices."""
    found = Axe().run(page.driver)["violations"]
    return [(rule["id"], [node["html"][:120] for node in rule["nodes"]]) for rule in found]


def tab_until(page, name, limit=40):
    for _ in range(limit):
        page.press(Keys.TAB)
        if page.focused == name:
            return
    raise AssertionError(f"{limit} times Tab did not reach {name}; at {page.focused}")


def test_a_conversation_by_keyboard_alone(page):
    page.press("What is 12 + 30?", Keys.ENTER)
    assert page.answered(1).text.startswith("42")
    page.press("one", Keys.SHIFT + Keys.ENTER, "two")
    assert page.find("#prompt").get_property("value") == "one\ntwo"
    page.press(Keys.CONTROL + "a", "What is 1 + 10?", Keys.ENTER)
    assert page.answered(2).text.startswith("11")
    page.press(Keys.ARROW_UP, Keys.CONTROL + "a", "What is 20 + 30?", Keys.ENTER)
    assert page.answered(2).text.startswith("50")


def test_settings_tools_and_a_result_by_keyboard_alone(page):
    tab_until(page, "system")
    page.press("Be kind.")
    while page.focused != "Tools":
        page.press(Keys.TAB)
    page.press(Keys.ENTER)
    tab_until(page, "tools-example")
    page.press(Keys.ENTER)
    assert page.focused == "tools"
    page.press(Keys.CONTROL + Keys.HOME)
    while page.focused != "prompt":
        page.press(Keys.SHIFT + Keys.TAB)
    page.press("What is the weather in Oslo?", Keys.ENTER)
    page.answered()
    page.until(lambda: page.focused.startswith("result-"))
    page.press('{"degrees": 3, "sky": "windy"}', Keys.ENTER)
    assert "windy in Oslo" in page.answered(2).text


def test_focus_goes_through_the_page_in_the_order_of_reading(page):
    page.run(FROM_THE_TOP)
    seen = []
    for _ in range(14):
        page.press(Keys.TAB)
        seen.append(page.focused)
    bar = ["model", "new-chat", "show-code", "show-batches", "show-live", "theme", "toggle-settings"]
    assert seen[:9] == ["Skip to the message box", *bar, "thread"]
    assert seen[-1] == "prompt" and "Attach pictures" not in seen


def test_what_has_the_focus_is_marked(page):
    page.run(FROM_THE_TOP)
    for _ in range(6):
        page.press(Keys.TAB)
        assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_the_skip_link_leads_to_the_message_box(page):
    page.run(FROM_THE_TOP)
    page.press(Keys.TAB, Keys.ENTER)
    assert page.focused == "prompt"


def test_an_answer_is_announced_by_sentences(page):
    page.ask("Continue the story: Once upon a time, Rosa lost a red kite in the forest.")
    page.answered()
    spoken = page.run("return [...document.querySelectorAll('#announcer p')].map((line) => line.textContent)")
    assert spoken[-1] == "End of the answer"
    assert all(line[-1] in ".:" for line in spoken[:-1])  # where a voice pauses; several come at once when tokens do
    assert " ".join(spoken[:-1]) == page.text(".answer .content").replace("\n", " ")
    assert page.find("#announcer").get_attribute("aria-live") == "polite"


def test_a_tool_call_and_a_stop_are_announced(page):
    page.example("Call a tool")
    page.answered()
    assert "The model calls get_weather: enter the result" in page.announced


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_systems_theme_is_used_and_the_switch_overrides_it(deployment, visit, theme):
    page = visit(URL).open(theme=theme)
    other = "dark" if theme == "light" else "light"
    brightness = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((sum, x) => sum + +x, 0)"
    assert (page.run(brightness) > 380) == (theme == "light")
    page.click("#theme")
    assert (page.run(brightness) > 380) == (other == "light")
    page.reload()
    assert (page.run(brightness) > 380) == (other == "light")
    assert page.find("#theme").get_attribute("aria-label") == f"Use the {theme} theme"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_axe_finds_no_barrier(deployment, visit, theme, size):
    page = visit(URL).open(size, theme)
    assert violations(page) == []
    page.example("Call a tool")
    page.answered()
    page.press('{"degrees": 3, "sky": "sunny"}', Keys.ENTER)
    page.answered(2)
    page.run("for (const part of document.querySelectorAll('details')) part.open = true")
    assert violations(page) == []


def test_axe_finds_no_barrier_in_dialogs_errors_and_thoughts(page):
    page.example("Think first")
    page.answered()
    page.click(".reasoning summary")
    page.set("extra", '{"top_logprobs": 3}')
    page.ask("What is 12 + 30?")
    page.answered(2)
    assert page.text(".answer .error") and violations(page) == []
    page.click("#show-code")
    assert violations(page) == []
    page.press(Keys.ESCAPE)
    page.run("document.getElementById('set-key').click()")
    assert violations(page) == []


def test_a_narrow_page_shows_everything_without_scrolling_sideways(deployment, visit):
    page = visit(URL).open(NARROW)
    page.example("Think first")
    page.answered()
    assert page.text(".answer .content") == "62"
    assert page.run("return document.documentElement.scrollWidth") <= NARROW[0]
    for css in ("#model", "#new-chat", "#theme", "#toggle-settings", "#prompt", "#send"):
        assert page.run(VISIBLE, page.find(css))


def test_a_narrow_page_has_its_settings_over_the_chat(deployment, visit):
    page = visit(URL).open(NARROW)
    assert not page.find("#settings").is_displayed()
    page.click("#toggle-settings")
    assert page.focused == "close-settings" and page.run("return document.querySelector('main').inert")
    page.press(Keys.ESCAPE)
    assert not page.find("#settings").is_displayed() and page.focused == "toggle-settings"


def test_the_next_request_is_shown_as_code_that_can_be_run(page):
    page.set("temperature", "0.5")
    page.find("#prompt").send_keys("Don't panic")
    page.click("#show-code")
    assert "Don'\\''t panic" in page.text("#code-text code") and "curl -sN" in page.text("#code-text code")
    page.click("input[value=python]")
    python = page.text("#code-text code")
    compile(python, "playground", "exec")
    assert f'base_url="{URL}v1"' in python and "stream=True" in python and "temperature=0.5" in python
