"""The playground and answers that no well-behaved model gives: cut anywhere, broken off, hostile."""

import json
import threading

import pytest

HOSTILE = """<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script>
[click](javascript:window.hacked=1) [data](data:text/html,<script>window.hacked=1</script>) <svg/onload=window.hacked=1>
![picture](https://example.invalid/leak.png) <iframe src="https://example.invalid"></iframe> **<b onclick=1>bold</b>**
| <img src=x onerror=window.hacked=1> | b |
|---|---|
| <style>*{display:none}</style> | `<i>` |

```html
</code></pre><script>window.hacked=1</script>
```
"""
MARKDOWN = """# Title

Some **bold**, *leaning*, ~~gone~~ and `code` text with [a link](https://example.invalid/a_b).

1. one
2. two
   - nested
   - again

> quoted

```python
print("hello")
```

| a | b |
|---|--:|
| 1 | 2 |
"""


def event(delta=None, reason=None, **fields):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    return b"data: " + json.dumps({"model": "scripted", "choices": choices, **fields}).encode() + b"\n\n"


def say(*texts, reason="stop", **more):
    usage = {"prompt_tokens": 3, "completion_tokens": len(texts)} | more
    events = [event({"content": text}) for text in texts]
    return [
        event({"role": "assistant", "content": ""}),
        *events,
        event({}, reason),
        event(usage=usage),
        b"data: [DONE]\n\n",
    ]


def error(message):
    return b"data: " + json.dumps({"error": {"message": message, "code": "unavailable"}}).encode() + b"\n\n"


@pytest.fixture
def page(scripted, visit):
    return visit(scripted.url).open()


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_events_are_read_however_they_were_cut(page, scripted, size):
    data = b": a comment\n\n" + b"".join(say("größer ", "als ", "日本 ", "🚣"))
    scripted.pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert page.asked("hi") == "größer als 日本 🚣"
    assert page.text(".answer .tokens") == "4 tokens"


def test_other_line_ends_and_several_data_lines_are_read(page, scripted):
    parts = [b'data: {"choices":[{"index":0,\r', b'\ndata: "delta":{"content":"both"}}]}\r\n\r\n', b"data:[DONE]\r\r"]
    scripted.pieces, scripted.pause_s = parts, 0.05
    assert page.asked("hi") == "both"


def test_tokens_a_step_are_told_where_there_were_drafts(page, scripted):
    drafts = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4}
    scripted.pieces = say("one ", "two", completion_tokens=9, completion_tokens_details=drafts)
    page.asked("hi")
    assert page.text(".answer .drafts") == "3.0 tokens a step"
    page.click(".answer .stats summary")
    assert "Drafted tokens accepted\n6 of 10 (60%)" in page.text(".answer dl")
    scripted.pieces = say("one ", "two")
    page.asked("again", 2)
    assert len(page.all(".answer .tokens")) == 2 and len(page.all(".answer .drafts")) == 1


def test_an_answer_grows_while_it_comes(page, scripted):
    scripted.pieces, scripted.releases = say("a kite ", "in the ", "wind"), threading.Semaphore(1)
    page.ask("hi")
    for shown in ("a kite", "a kite in the", "a kite in the wind"):
        scripted.releases.release()
        page.until(lambda shown=shown: page.text(".answer.streaming .content") == shown)
    scripted.releases = None
    assert page.answered().text.startswith("a kite in the wind")


def test_an_error_in_mid_answer_is_shown_below_what_came_before(page, scripted):
    scripted.pieces = [b"".join([*say("half of it")[:2], error("the engine died"), b"data: [DONE]\n\n"])]
    assert page.asked("hi") == "half of it"
    assert "the engine died" in page.text(".answer .error") and "scripted-1" in page.text(".answer .error .note")
    scripted.pieces = say("all of it")
    page.click(".answer .error button")
    assert page.answered(1).text.startswith("all of it") and not page.all(".answer .error")


def test_an_answer_that_breaks_off_is_no_whole_answer(page, scripted):
    scripted.pieces = say("half")[:2]
    assert page.asked("hi") == "half"
    assert "connection ended before the answer did" in page.text(".answer .error")


def test_nonsense_instead_of_events_is_an_error_of_its_own(page, scripted):
    scripted.pieces = [b"data: {oops\n\n"]
    page.ask("hi")
    page.answered()
    assert "not understood" in page.text(".answer .error")


def test_what_a_model_writes_never_becomes_markup(page, scripted):
    scripted.pieces = say(HOSTILE)
    page.ask(HOSTILE.replace("\n", " "))
    page.answered()
    inside = page.run(
        "return [...document.querySelectorAll('.turn .content *, .bubble *')].map((node) => node.localName)"
    )
    assert not {"img", "script", "iframe", "svg", "style", "b", "i"} & set(inside) - {"svg"}
    assert page.run("return window.hacked ?? null") is None
    links = page.run("return [...document.querySelectorAll('.content a')].map((link) => [link.href, link.rel])")
    assert {href for href, _ in links} == {"https://example.invalid/leak.png", "https://example.invalid/"}
    assert {rel for _, rel in links} == {"noopener noreferrer nofollow"}
    assert '<img src=x onerror="window.hacked=1">' in page.text(".content") and "<img src=x" in page.text(".bubble")


def test_hostile_reasoning_tool_names_arguments_and_errors_stay_text(page, scripted):
    evil = "<img src=x onerror=window.hacked=1>"
    call = {"index": 0, "id": evil, "type": "function", "function": {"name": evil, "arguments": evil}}
    scripted.pieces = [event({"reasoning_content": evil}), event({"tool_calls": [call]}), error(evil)]
    page.ask("hi")
    page.answered()
    assert page.run("return document.querySelectorAll('.thread img').length") == 0
    assert page.run("return window.hacked ?? null") is None and evil in page.text(".answer .error")


FORBIDDEN = {
    "markup": "document.body.innerHTML = '<b>x</b>'",
    "a handler in an attribute": "document.createElement('img').setAttribute('onerror', 'window.hacked = 1')",
    "a call to another server": "await fetch('https://example.invalid/')",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_browser_itself_refuses(page, what):
    script = f"try {{ {FORBIDDEN[what]}; return ''; }} catch (error) {{ return error.name; }}"
    assert page.run_module(script) == "TypeError"
    assert page.run("return window.hacked ?? null") is None
    page.complaints()  # about just this


def test_markdown_is_shown_as_what_it_means(page, scripted):
    scripted.pieces = say(*[MARKDOWN[at : at + 5] for at in range(0, len(MARKDOWN), 5)])
    page.ask("hi")
    page.answered()
    count = "return document.querySelectorAll(`.content ${arguments[0]}`).length"
    wanted = {
        "h3": 1, "strong": 1, "em": 1, "del": 1, "p code": 1, "a": 1, "ol > li": 2, "ol ul > li": 2, "blockquote": 1,
        "pre": 1, "th": 2, "td.align-end": 1,
    }  # fmt: skip
    assert {css: page.run(count, css) for css in wanted} == wanted
    items = page.run("return [...document.querySelectorAll('.content li')].map((item) => item.firstChild.textContent)")
    assert items == ["one", "two", "nested", "again"]
    assert page.text(".content pre") == 'print("hello")' and page.text(".code-head span") == "python"


def test_a_growing_text_is_shown_as_the_whole_text_would_be(page):
    same = """
        const { MarkdownView } = await load("markdown.js");
        const [text] = [arguments[0]];
        const grown = document.createElement("div"), whole = document.createElement("div");
        const view = new MarkdownView(grown);
        for (let end = 1; end <= text.length; end += 1) view.show(text.slice(0, end));
        new MarkdownView(whole).show(text);
        return grown.isEqualNode(whole);
    """.replace("arguments[0]", json.dumps(MARKDOWN * 2 + HOSTILE))
    assert page.run_module(same) is True


def test_no_text_keeps_the_page_busy(page):
    texts = [
        "*a ",
        "**a *b ",
        "[a](",
        "[a [b] ",
        "> ",
        "- ",
        "`a``",
        "_a",
        "https://[",
        "|-",
        "~~~\n",
        "1. \n",
        "<https://a",
    ]
    slowest = """
        const { MarkdownView } = await load("markdown.js");
        const times = TEXTS.map((text) => {
          const began = performance.now();
          new MarkdownView(document.createElement("div")).show(text.repeat(20000 / text.length));
          return performance.now() - began;
        });
        return Math.max(...times);
    """.replace("TEXTS", json.dumps(texts))
    assert page.run_module(slowest) < 5000  # exponential or cubic work would be minutes


def test_several_calls_are_answered_together(page, scripted):
    calls = [
        {"index": at, "id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for at, name in enumerate(("first", "second"))
    ]
    scripted.pieces = [
        event({"tool_calls": [calls[0]]}),
        event({"tool_calls": [calls[1]]}),
        event({}, "tool_calls"),
        b"data: [DONE]\n\n",
    ]
    page.ask("hi")
    page.answered()
    areas = page.all(".call textarea")
    areas[0].send_keys("one")
    page.click(".send-results")
    assert len(scripted.requests) == 1 and areas[1] == page.driver.switch_to.active_element
    scripted.pieces = say("done")
    areas[1].send_keys("two")
    page.click(".send-results")
    assert page.answered(2).text.startswith("done")
    results = [
        (m["tool_call_id"], m["content"]) for m in json.loads(scripted.requests[1])["messages"] if m["role"] == "tool"
    ]
    assert results == [("call_0", "one"), ("call_1", "two")]


def test_the_request_is_what_the_settings_say(page, scripted):
    values = {
        "system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "seed": "0",
        "max_completion_tokens": "64", "presence_penalty": "-0.5", "frequency_penalty": "0", "effort": "low",
        "stop": "END\n\\n", "repetition_penalty": "1.1",
        "extra": '{"logit_bias": {"7": -100}, "bireme": {"priority": 1}}',
    }  # fmt: skip
    for name, value in values.items():
        page.set(name, value)
    scripted.pieces = say("ok")
    page.asked("hi")
    assert json.loads(scripted.requests[0]) == {
        "model": "scripted", "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "temperature": 0.5, "top_p": 0.9, "seed": 0, "max_completion_tokens": 64, "presence_penalty": -0.5,
        "frequency_penalty": 0, "stop": ["END", "\n"], "reasoning_effort": "low", "logit_bias": {"7": -100},
        "bireme": {"return_timing": True, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "priority": 1},
    }  # fmt: skip


def test_the_chosen_model_is_asked_and_remembered(page, scripted):
    assert [option.text for option in page.all("#model option")] == ["scripted", "other", "vectors"]
    page.find("#model").send_keys("other")
    page.reload()
    scripted.pieces = say("ok")
    page.asked("hi")
    assert json.loads(scripted.requests[0])["model"] == "other"


def test_a_conversation_outlives_a_reload(page, scripted):
    call = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    scripted.pieces = [event({"reasoning_content": "hm"}), event({"tool_calls": [call]}), *say(reason="tool_calls")[1:]]
    page.asked("first")
    page.reload()
    assert page.text(".bubble") == "first" and page.text(".call-name") == "look" and page.announced == ""
    page.find(".call textarea").send_keys("seen")
    scripted.pieces = say("half of it")[:2]
    page.click(".send-results")
    page.answered(2)
    sent = json.loads(scripted.requests[1])["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["reasoning_content"] == "hm"
    page.reload()
    assert "connection ended" in page.text(".answer .error") and page.all(".answer")[1].text.startswith("half of it")
    page.click("#new-chat")
    page.reload()
    assert page.all(".welcome")


def test_an_answer_that_a_reload_interrupts_is_kept_as_stopped(page, scripted):
    scripted.pieces, scripted.releases = say(*["word "] * 5), threading.Semaphore(4)
    page.ask("hi")
    page.until(lambda: "word word" in page.text(".content"))
    page.reload()
    assert "word word" in page.text(".content") and "Stopped." in page.text(".answer")


TOOLS_PROBLEMS = {
    "{": "Not valid JSON",
    "[1]": "Tool 1: write",
    '[{"type": "function", "function": {"name": "a b"}}]': '"name" takes 1 to 64',
    '[{"name": "a"}, {"name": "a"}]': "Two tools are called a",
    '{"name": "a", "parameters": 3}': '"parameters" must be a JSON schema',
}


@pytest.mark.parametrize("text", TOOLS_PROBLEMS)
def test_a_mistake_in_the_tools_is_named_and_not_sent(page, scripted, text):
    page.set("tools", text)
    page.ask("hi")
    assert TOOLS_PROBLEMS[text] in page.text("#tools-problem")
    assert page.focused == "tools" and scripted.requests == []


def test_tools_and_a_response_format_are_not_sent_together(page, scripted):
    page.run("for (const part of document.querySelectorAll('.settings details')) part.open = true")
    page.click("#tools-example")
    assert page.text("#tools-problem") == "get_weather"
    page.set("format", "json_object")
    page.ask("hi")
    assert "Not together with tools" in page.text("#format-problem") and scripted.requests == []
    page.click(".chip button")
    scripted.pieces = say("{}")
    assert page.asked("").endswith("{}") and "tools" not in json.loads(scripted.requests[0])


def test_a_tool_choice_names_a_function(page, scripted):
    page.set("tools", '[{"name": "look"}, {"name": "listen"}]')
    page.set("tool_choice", "function:listen")
    page.run("document.getElementById('parallel').click()")
    scripted.pieces = say("ok")
    page.asked("hi")
    sent = json.loads(scripted.requests[0])
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "listen"}}
    assert sent["parallel_tool_calls"] is False and [tool["type"] for tool in sent["tools"]] == ["function"] * 2


def test_an_answer_is_copied(page, scripted):
    scripted.pieces = say("copy **me**")
    page.asked("hi")
    page.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"], "origin": page.url})
    page.click(".foot .copy")
    page.until(lambda: "Copied" in page.announced)
    assert page.run_module("return navigator.clipboard.readText()") == "copy **me**"


def test_a_long_answer_is_followed_unless_the_reader_scrolls_up(page, scripted):
    scripted.pieces, scripted.releases = say(*[f"line {at}\n\n" for at in range(120)]), threading.Semaphore(64)
    page.ask("hi")
    page.until(lambda: "line 60" in page.text(".content"))
    left = "const t = document.getElementById('thread'); return t.scrollHeight - t.scrollTop - t.clientHeight"
    assert page.run(left) < 100
    page.run("document.getElementById('thread').scrollTop = 0")
    scripted.releases = None
    page.answered()
    assert page.run("return document.getElementById('thread').scrollTop") == 0
    page.click("#to-end")
    assert page.run(left) < 100
