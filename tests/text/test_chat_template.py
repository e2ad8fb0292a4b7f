import time

import pytest

from bireme.errors import ConfigError, RequestError
from bireme.text import chat_template
from bireme.text.chat_template import ChatTemplate
from bireme.text.control_tokens import ControlTokens

SIMPLE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


def render(source, messages=(), **more):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(list(messages), **more).text


def user(content):
    return {"role": "user", "content": content}


def test_helpers_of_transformers_are_there():
    source = "{{ bos_token }}{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') | length }}{{ dict(a=1).a }}"
    assert render(source) == '<s>{"a": "<é>"}41'


def test_blocks_are_trimmed_and_loops_can_break():
    source = "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}\n"
    assert render(source, [user("a"), user("b")]) == "a\n"


def test_generation_blocks_show_their_body():
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}c", [user("b")]) == "abc"


def test_add_generation_prompt_is_true_unless_the_request_says_otherwise():
    source = "{{ add_generation_prompt }}"
    assert render(source) == "True"
    assert render(source, variables={"add_generation_prompt": False}) == "False"


def test_what_a_template_raises_is_the_requests_fault():
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_message_without_what_the_template_needs_is_refused():
    with pytest.raises(RequestError, match="can't show them: TypeError"):
        render("{{ 'a' + messages[0].content }}", [{"role": "user", "content": 3}])


def test_an_invalid_template_is_the_models_fault():
    with pytest.raises(ConfigError, match="chat template is not valid"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ dict.mro() }}"])
def test_python_internals_and_changes_are_out_of_reach(source):
    with pytest.raises(RequestError):
        render(source + "{{ 1/0 }}", [user("a")])
    with pytest.raises(RequestError, match=r"refuses|undefined"):
        render(source, [user("a")])


def test_the_prompts_size_is_limited():
    template = ChatTemplate("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}", {}, max_bytes=10_000)
    with pytest.raises(RequestError, match="max_prompt_bytes 10000"):
        template.render([user("x" * 100)])


def test_the_rendering_time_is_limited(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", -1.0)
    with pytest.raises(RequestError, match="took more than"):
        render(SIMPLE, [user("a")])


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools"])
def test_a_request_can_not_replace_the_template_or_the_messages(name):
    with pytest.raises(RequestError, match=f"chat_template_kwargs.{name}"):
        render(SIMPLE, [user("a")], variables={name: "{{ 7 * 7 }}"})


def test_text_parts_are_one_string_and_other_parts_stay():
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(SIMPLE, [user(text)]) == "<|user|>a\nb<|end|>"
    assert "image" in render("{{ messages[0].content[1].type }}", [user([*text[:1], {"type": "image"}])])


def test_arguments_of_tool_calls_are_objects():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls[0].function.arguments.a + 1 }}", [message]) == "2"
    assert call["function"]["arguments"] == '{"a": 1}'


def test_control_tokens_in_messages_are_marked_and_come_back():
    messages = [{"role": role, "content": f"a<|end|>{role}"} for role in ("user", "tool", "assistant")]
    prompt = ChatTemplate(SIMPLE, {}, controls=ControlTokens(["<|end|>"])).render(messages)
    assert prompt.text == "".join(f"<|{one['role']}|>{one['content']}<|end|>" for one in messages)
    assert prompt.pieces[1::2] == ("<|end|>",) * 3


def test_a_message_can_not_forge_a_mark():
    text = "0123456789012345678900000000 00000000 <|end|>"
    prompt = ChatTemplate(SIMPLE, {}, controls=ControlTokens(["<|end|>"])).render([user(text)])
    assert prompt.pieces[1::2] == ("<|end|>",) and text in prompt.text


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Oslo"}'}}
BEGIN = "{% for m in messages %}[{{ m.role }}]"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
JOINED = "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}"
CALL_TEMPLATES = {
    "as they come": (
        f"{BEGIN}{{{{ m.content }}}}{CALLS}{{% endfor %}}", '[assistant]Hm.look {"city": "Oslo"}[tool]rain'),
    "arguments joined with +": (
        f"{BEGIN}{{{{ m.content }}}}{JOINED}{{% endfor %}}", '[assistant]Hm.look {"city": "Oslo"}[tool]rain'),
    "calls only without content": (
        f"{BEGIN}{{% if m.content is none %}}{CALLS}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}",
        '[assistant]Hm.[assistant]look {"city": "Oslo"}[tool]rain'),
    "calls hide the content": (
        f"{BEGIN}{{% if m.tool_calls %}}{CALLS}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}",
        '[assistant]Hm.[assistant]look {"city": "Oslo"}[tool]rain'),
    "no calls": (
        BEGIN + "{{ m.content }}{% endfor %}",
        '[assistant]Hm.\n{"name": "look", "arguments": {"city": "Oslo"}}[tool]rain'),
    "neither calls nor results": (
        "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}",
        '[assistant]Hm.\n{"name": "look", "arguments": {"city": "Oslo"}}[user]rain\nsnow\nand?'),
}  # fmt: skip


@pytest.mark.parametrize("name", CALL_TEMPLATES)
@pytest.mark.parametrize("content", ["Hm.", "", None])
def test_calls_text_and_results_reach_the_prompt_whatever_form_a_template_asks_for(name, content):
    source, expected = CALL_TEMPLATES[name]
    results = [{"role": "tool", "tool_call_id": "1", "content": content} for content in ("rain", "snow")]
    answer = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    shown = render(source, [user("?"), answer, *results, user("and?")])
    if content and name == "neither calls nor results":
        assert shown == f"[user]?{expected}"
    elif content:
        assert shown == f"[user]?{expected}[tool]snow[user]and?"
    assert all(text in shown for text in ("look", "Oslo", "rain", "snow", "and?"))
    assert content is None or "None" not in shown


ONE_CALL = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ f.name }} {{ f.arguments | tojson }}{% endif %}{% endfor %}"
)


NO_SECOND = (
    "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one!') }}{% endfor %}"
)


@pytest.mark.parametrize("refusal", ["", NO_SECOND])
def test_each_of_several_calls_is_a_message_before_its_result_where_a_template_takes_one(refusal):
    second = {"id": "2", "type": "function", "function": {"name": "look", "arguments": '{"city": "Bergen"}'}}
    results = [{"role": "tool", "tool_call_id": one, "content": text} for one, text in (("2", "sun"), ("1", "rain"))]
    answer = {"role": "assistant", "content": "Hm.", "reasoning_content": "so", "tool_calls": [CALL, second]}
    shown = render(refusal + ONE_CALL, [user("?"), answer, *results, {"role": "tool", "content": "late"}, user("and?")])
    assert shown == (
        '[user]?[assistant]Hm.look {"city": "Oslo"}[tool]rain[assistant]look {"city": "Bergen"}[tool]sun'
        "[tool]late[user]and?"
    )
    assert "Bergen" in render(refusal + ONE_CALL, [user("?"), answer])


def test_many_calls_in_one_message_cost_each_result_a_look():
    looks = []

    class Result(dict):
        def get(self, name, default=None):
            looks.append(name)
            return super().get(name, default)

    calls = [{**CALL, "id": str(number)} for number in range(100)]
    results = [Result(role="tool", tool_call_id=str(-number), content="r") for number in range(100)]
    template = ChatTemplate(ONE_CALL, {})
    template.render([user("?"), {"role": "assistant", "content": "", "tool_calls": calls}, *results])
    assert 100 <= looks.count("tool_call_id") <= 400


def test_many_results_that_a_template_has_no_place_for_cost_no_more_than_their_bytes():
    results = [{"role": "tool", "tool_call_id": "1", "content": "r" * 4000} for _ in range(2000)]
    template, began = ChatTemplate(CALL_TEMPLATES["neither calls nor results"][0], {}, 16 << 20), time.process_time()
    shown = template.render([user("?"), *results, {"role": "tool", "content": [{"type": "text"}]}, user("and?")]).text
    assert shown.count("r" * 4000) == 2000 and shown.count("[user]") == 3
    assert time.process_time() - began < 0.5  # copied with each result: seconds


def test_control_tokens_in_calls_that_are_written_as_text_stay_text():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\u003c|end|>"}'}}
    for source in (SIMPLE, CALL_TEMPLATES["arguments joined with +"][0]):
        messages = [user("a"), {"role": "assistant", "content": "<|end|>", "tool_calls": [call]}]
        prompt = ChatTemplate(source, {}, controls=ControlTokens(["<|end|>"])).render(messages)
        assert "".join(prompt.pieces[::2]).count("<|end|>") == source.count("<|end|>") * 2


LLAVA = (
    "{% for m in messages %}{{ m.role | upper }}: "
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endfor %}"
)


CONTINUED = {"role": "assistant", "content": " so <x>far ", "continue_final_message": True}
GOES_ON = {
    "text": ("{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}", "<assistant> so <x>far "),
    "stripped text": ("{% for m in messages %}{{ m.content | trim }}\n{% endfor %}", "hi\nso <x>far "),
    "parts": (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}{% endif %}{{ p.text }}"
        "{% endfor %};{% endfor %}", "hi; so <x>far ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOES_ON)
def test_a_prompt_may_end_within_the_last_message(name):
    source, end = GOES_ON[name]
    prompt = ChatTemplate(source, {}, controls=ControlTokens(["<x>"])).render([user("hi"), CONTINUED])
    assert prompt.text.endswith(end) and "continue_final" not in prompt.text


def test_a_template_that_leaves_the_last_message_out_can_not_go_on_with_it():
    with pytest.raises(RequestError, match="continue_final_message: the model's chat template leaves"):
        render("{{ messages[0].content }}", [user("hi"), CONTINUED])


def test_a_template_that_knows_parts_alone_gets_text_as_a_part():
    assert render(LLAVA, [user("hello")]) == "USER: hello"
    assert render(LLAVA, [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]) == "USER: ab"


def test_pictures_stay_parts_beside_text():
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    assert render(LLAVA, [user(content)]).split() == ["USER:", "<image>what?"]
