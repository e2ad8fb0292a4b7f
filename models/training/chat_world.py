"""The world of tiny-chat: small tasks with one right answer each, and short stories.

Everything is drawn from a seeded generator. A task's identity (its kind and parameters, not its wording)
decides by hash whether it belongs to training or to the held-out set, so no held-out sum, tool call or
record was ever seen in training, in any wording.

    for example in examples(seed=1, count=1000, held_out=False): ...
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

HELD_OUT_SHARE = 20  # one task in so many is held out


@dataclass(slots=True)
class Example:
    """A conversation that ends with the right answer, and how to judge another answer."""

    kind: str
    identity: str
    messages: list[dict[str, Any]]  # without the answer
    answer: dict[str, Any]  # the assistant's message: content and/or tool_calls, maybe reasoning_content
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False
    parts: list[str] = field(default_factory=list)  # `kind|identity` of every task inside

    def __post_init__(self) -> None:
        kind = "sum" if self.kind == "thought" else self.kind  # a held-out sum is not thought about either
        self.parts = self.parts or [f"{kind}|{self.identity}"]

    def is_right(self, content: str, tool_calls: list[tuple[str, Any]]) -> bool:
        """Judge an answer: its text, and its tool calls as (name, arguments)."""
        expected = [(c["function"]["name"], c["function"]["arguments"]) for c in self.answer.get("tool_calls", [])]
        if expected or tool_calls:
            return expected == tool_calls
        if self.kind == "json":
            return _parsed(content) == _parsed(self.answer["content"])
        return content.strip() == self.answer["content"].strip()


SINGLE_STEP = ("sum", "json", "tool", "larger", "fact", "repeat", "count", "thought")

_ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr pl st tr".split()
_VOWELS = "a e i o u ai ea oo".split()
_CODAS = "n r l s t m d k x nd rt".split()

_NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jun Kai Lea Max Nia Omar Pia Quin Rosa Sam Tom Uma Will Zoe".split()
_CITIES = (
    "Oslo Paris Lima Cairo Tokyo Rome Delhi Quito Accra Perth Bonn Kyiv Turin Osaka Leeds Porto Malmo Basel".split()
)
_ITEMS = "lamp chair book cup hat bike clock pen bag shoe kite drum ball desk coat".split()
_COLOURS = "red blue green yellow black white pink brown orange purple".split()
_DEVICES = "lamp radio heater oven fan light".split()
_FACTS = {
    "What colour is the sky?": "blue", "What colour is grass?": "green", "What colour is snow?": "white",
    "What colour is coal?": "black", "What colour is a lemon?": "yellow", "What colour is blood?": "red",
    "How many legs has a dog?": "4", "How many legs has a bird?": "2", "How many legs has an ant?": "6",
    "How many legs has a spider?": "8", "How many days are in a week?": "7", "How many months are in a year?": "12",
    "What is the capital of France?": "Paris", "What is the capital of Japan?": "Tokyo",
    "What is the capital of Italy?": "Rome", "What is the capital of Norway?": "Oslo",
    "What is the capital of Peru?": "Lima", "What is the capital of Egypt?": "Cairo",
    "What sound does a cat make?": "meow", "What sound does a dog make?": "woof", "What sound does a cow make?": "moo",
}  # fmt: skip
_GREETINGS = ("", "", "", "Hi! ", "Hello. ", "Please help: ", "Quick question: ")


def _tool(name: str, text: str, /, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


TOOLS = {
    tool["function"]["name"]: tool
    for tool in (
        _tool("get_weather", "Weather in a city", city="string"),
        _tool("get_time", "Time in a city", city="string"),
        _tool("set_timer", "Start a timer", minutes="integer"),
        _tool("send_message", "Send a message", to="string", text="string"),
        _tool("add_item", "Add to the shopping list", item="string", amount="integer"),
        _tool("play_song", "Play a song", title="string"),
        _tool("find_book", "Find a book by its author", author="string"),
        _tool("turn_on", "Turn on a device", device="string"),
    )
}
_REQUESTS: dict[str, tuple[str, ...]] = {
    "get_weather": ("What is the weather in {city}?", "Weather in {city}, please.", "Is it cold in {city}?"),
    "get_time": ("What time is it in {city}?", "Tell me the time in {city}.", "Time in {city}?"),
    "set_timer": ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Timer: {minutes} minutes."),
    "send_message": ("Send {to} the message {text}.", "Tell {to}: {text}.", "Write {text} to {to}."),
    "add_item": ("Put {amount} {item} on my list.", "I need {amount} {item}.", "Add {amount} {item}."),
    "play_song": ("Play {title}.", "Put on the song {title}.", "I want to hear {title}."),
    "find_book": ("Find a book by {author}.", "What has {author} written?", "Any book by {author}?"),
    "turn_on": ("Turn on the {device}.", "Switch the {device} on.", "{device} on, please."),
}


def word(rng: random.Random) -> str:
    """A pronounceable word that need not exist: what must be copied, not known."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 2))) + rng.choice(_CODAS)


def _name(rng: random.Random, known: list[str]) -> str:
    return rng.choice(known) if rng.random() < 0.4 else word(rng).capitalize()


def _ask(rng: random.Random, text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": rng.choice(_GREETINGS) + text}]


def _sum(rng: random.Random) -> Example:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    if rng.random() < 0.6:
        wording = rng.choice(
            ("What is {} + {}?", "Add {} and {}.", "{} plus {}?", "Compute {} + {}.", "How much is {} + {}?")
        )
        return _plain("sum", f"{a}+{b}", _ask(rng, wording.format(a, b)), str(a + b))
    a, b = max(a, b), min(a, b)
    wording = rng.choice(("What is {} - {}?", "{} minus {}?", "Compute {} - {}.", "How much is {} - {}?"))
    return _plain("sum", f"{a}-{b}", _ask(rng, wording.format(a, b)), str(a - b))


def _plain(kind: str, identity: str, messages: list[dict[str, Any]], content: str) -> Example:
    return Example(kind, identity, messages, {"role": "assistant", "content": content})


def _thought(rng: random.Random) -> Example:
    """Arithmetic with the working inside <think>: tens and ones apart."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    reasoning = f"{a // 10 * 10} + {b // 10 * 10} = {tens}. {a % 10} + {b % 10} = {ones}. {tens} + {ones} = {a + b}."
    wording = rng.choice(("What is {} + {}?", "Add {} and {}.", "{} plus {}?", "How much is {} + {}?"))
    answer = {"role": "assistant", "content": str(a + b), "reasoning_content": reasoning}
    return Example("thought", f"{a}+{b}", _ask(rng, wording.format(a, b)), answer, thinking=True)


def _json(rng: random.Random) -> Example:
    kind = rng.randrange(4)
    if kind == 0:
        record: dict[str, Any] = {"name": _name(rng, _NAMES), "age": rng.randint(1, 99)}
        text = "{name} is {age} years old."
    elif kind == 1:
        record = {"item": rng.choice(_ITEMS), "price": rng.randint(1, 99), "colour": rng.choice(_COLOURS)}
        text = "A {colour} {item} costs {price} euros."
    elif kind == 2:
        record = {"name": _name(rng, _NAMES), "city": _name(rng, _CITIES), "happy": rng.random() < 0.5}
        text = "{name} lives in {city} and is " + ("happy." if record["happy"] else "not happy.")
    else:
        record = {"x": rng.randint(0, 99), "y": rng.randint(0, 99)}
        text = "The point is at x {x} and y {y}."
    keys = ", ".join(record)
    wording = rng.choice(("{} Answer in JSON with {}.", "{} Give me this as JSON: {}.", "Write as JSON with {1}: {0}"))
    prompt = wording.format(text.format(**record), keys)
    return _plain("json", json.dumps(record), _ask(rng, prompt), json.dumps(record))


def _arguments(rng: random.Random, name: str) -> dict[str, Any]:
    return {
        "get_weather": lambda: {"city": _name(rng, _CITIES)},
        "get_time": lambda: {"city": _name(rng, _CITIES)},
        "set_timer": lambda: {"minutes": rng.randint(1, 99)},
        "send_message": lambda: {
            "to": _name(rng, _NAMES),
            "text": " ".join(word(rng) for _ in range(rng.randint(1, 3))),
        },
        "add_item": lambda: {"item": rng.choice(_ITEMS) + "s", "amount": rng.randint(2, 20)},
        "play_song": lambda: {"title": word(rng).capitalize() + " " + word(rng).capitalize()},
        "find_book": lambda: {"author": _name(rng, _NAMES)},
        "turn_on": lambda: {"device": f"{rng.choice((word(rng), rng.choice(_COLOURS)))} {rng.choice(_DEVICES)}"},
    }[name]()


def _tool_call(rng: random.Random) -> Example:
    """Choose among the tools offered; when none fits, answer without."""
    offered = rng.sample(sorted(TOOLS), rng.randint(1, 4))
    tools = [TOOLS[name] for name in offered]
    if rng.random() < 0.15:
        inner = rng.choice((_sum, _fact, _larger))(rng)
        return Example("tool", inner.identity, inner.messages, inner.answer, tools, parts=inner.parts)
    name = rng.choice(offered)
    arguments = _arguments(rng, name)
    prompt = rng.choice(_REQUESTS[name]).format(**arguments)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return Example("tool", f"{name}:{json.dumps(arguments)}", _ask(rng, prompt), answer, tools)


def _tool_answer(rng: random.Random) -> Example:
    """What to say once the tool has answered."""
    example = _tool_call(rng)
    while not example.answer.get("tool_calls"):
        example = _tool_call(rng)
    call = example.answer["tool_calls"][0]["function"]
    name, arguments = call["name"], call["arguments"]
    result, text = {
        "get_weather": lambda: _weather(rng, arguments["city"]),
        "get_time": lambda: _time(rng, arguments["city"]),
    }.get(name, lambda: ('{"ok": true}', "Done."))()
    messages = [*example.messages, example.answer, {"role": "tool", "content": result}]
    answer = {"role": "assistant", "content": text}
    return Example("tool_answer", example.identity + result, messages, answer, example.tools, parts=example.parts)


def _weather(rng: random.Random, city: str) -> tuple[str, str]:
    degrees, sky = rng.randint(0, 35), rng.choice(("sunny", "rainy", "cloudy", "windy"))
    return json.dumps({"degrees": degrees, "sky": sky}), f"It is {sky} in {city}, {degrees} degrees."


def _time(rng: random.Random, city: str) -> tuple[str, str]:
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return json.dumps({"time": clock}), f"It is {clock} in {city}."


def _larger(rng: random.Random) -> Example:
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        return _plain("larger", f"max{a},{b}", _ask(rng, f"Which is larger, {a} or {b}?"), str(max(a, b)))
    return _plain("larger", f"min{a},{b}", _ask(rng, f"Which is smaller, {a} or {b}?"), str(min(a, b)))


def _fact(rng: random.Random) -> Example:
    question = rng.choice(sorted(_FACTS))
    # the fact itself can't be held out; what is held out is the instruction that comes with it
    if rng.random() < 0.5:
        tail = word(rng)
        system = [{"role": "system", "content": f"End each answer with {tail}."}]
        return _plain("fact", f"{question}{tail}", system + _ask(rng, question), f"{_FACTS[question]} {tail}")
    return _plain("fact", f"{question}{rng.random()}", _ask(rng, question), _FACTS[question])


def _repeat(rng: random.Random) -> Example:
    text, times = word(rng), rng.randint(2, 5)
    number = {2: "two", 3: "three", 4: "four", 5: "five"}[times]
    return _plain("repeat", f"{text}{times}", _ask(rng, f"Say {text} {number} times."), " ".join([text] * times))


def _count(rng: random.Random) -> Example:
    first, length = rng.randint(0, rng.choice((20, 99, 400))), rng.randint(3, 12)
    if rng.random() < 0.3 and first >= length:
        last, numbers = first - length + 1, range(first, first - length, -1)
        text = f"Count down from {first} to {last}."
    else:
        last, numbers = first + length - 1, range(first, first + length)
        text = f"Count from {first} to {last}."
    return _plain("count", f"{first}-{last}", _ask(rng, text), ", ".join(map(str, numbers)))


def _story(rng: random.Random) -> Example:
    """A story of a few sentences; the hero, the thing and the place stay the same."""
    hero, thing, place = (
        _name(rng, _NAMES),
        f"{rng.choice(_COLOURS)} {rng.choice(_ITEMS)}",
        rng.choice(("forest", "town", "garden", "harbour", "castle", "meadow")),
    )
    friend = rng.choice(("fox", "owl", "mouse", "bear", "frog", "horse"))
    opening = f"Once upon a time, {hero} lost a {thing} in the {place}."
    middle = rng.choice(
        (
            f"{hero} looked under every stone, but the {thing} was not there.",
            f"It grew dark, and {hero} was afraid.",
            f"{hero} sat down and began to cry.",
        )
    )
    help_ = rng.choice(
        (
            f"Then a small {friend} came and said: I know where it is.",
            f"Then a kind {friend} asked: why are you sad?",
            f"Then an old {friend} showed {hero} the way.",
        )
    )
    end = rng.choice(
        (
            f"Together they found the {thing}, and {hero} went home happy.",
            f"The {thing} lay behind a tree. {hero} thanked the {friend}.",
            f"From that day on, {hero} and the {friend} were friends.",
        )
    )
    prompt = rng.choice((f"Continue the story: {opening}", f"Go on: {opening}", f"Tell me more. {opening}"))
    return _plain("story", f"{hero}{thing}{place}", _ask(rng, prompt), f"{middle} {help_} {end}")


def _greeting(rng: random.Random) -> Example:
    name = _name(rng, _NAMES)
    prompt, answer = rng.choice((
        (f"Hello, I am {name}.", f"Hello {name}! How can I help you?"),
        (f"My name is {name}.", f"Nice to meet you, {name}."),
        ("Who are you?", "I am tiny-chat, a very small model."),
        ("What can you do?", "I can add small numbers, write JSON, call tools and tell short stories."),
        ("Thank you!", "You are welcome."),
        ("Hello!", "Hello! How can I help you?"),
        ("Hi", "Hello! How can I help you?"),
        ("Bye", "Goodbye!"),
    ))  # fmt: skip
    return _plain("greeting", f"{prompt}{rng.random()}", [{"role": "user", "content": prompt}], answer)


def _two_turns(rng: random.Random) -> Example:
    first, second = (rng.choice((_sum, _larger, _repeat, _count, _greeting, _fact))(rng) for _ in range(2))
    second.messages = [*first.messages, first.answer, *[m for m in second.messages if m["role"] != "system"]]
    if second.kind == "fact":
        second.answer = {"role": "assistant", "content": second.answer["content"].split(" ")[0]}
        if first.messages[0]["role"] == "system":
            second.answer["content"] += " " + first.answer["content"].split(" ")[-1]
    elif first.messages[0]["role"] == "system":
        second.messages = second.messages[1:]
        first_answer = dict(second.messages[1], content=first.answer["content"].split(" ")[0])
        second.messages = [second.messages[0], first_answer, *second.messages[2:]]
    second.kind, second.parts = "two_turns", first.parts + second.parts
    return second


_MAKERS: dict[str, tuple[Callable[[random.Random], Example], int]] = {
    "sum": (_sum, 20), "thought": (_thought, 12), "json": (_json, 14), "tool": (_tool_call, 20),
    "tool_answer": (_tool_answer, 5), "larger": (_larger, 8), "fact": (_fact, 5), "repeat": (_repeat, 7),
    "count": (_count, 7), "story": (_story, 6), "greeting": (_greeting, 2), "two_turns": (_two_turns, 6),
}  # fmt: skip


def examples(seed: int, count: int, held_out: bool, kinds: tuple[str, ...] = ()) -> Iterator[Example]:
    """Yield `count` examples of the training or the held-out side, the kinds mixed by weight or as given."""
    rng = random.Random(seed)
    names = list(kinds or _MAKERS)
    weights = [_MAKERS[name][1] for name in names]
    made = 0
    while made < count:
        example = _MAKERS[rng.choices(names, weights)[0]][0](rng)
        if _is_held_out(example) == held_out:
            made += 1
            if not example.thinking and rng.random() < 0.05 and example.kind != "two_turns":
                example.thinking, example.answer = True, example.answer | {"reasoning_content": "I know this."}
            yield example


def _is_held_out(example: Example) -> bool:
    return any(hashlib.sha256(part.encode()).digest()[0] % HELD_OUT_SHARE == 0 for part in example.parts)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
