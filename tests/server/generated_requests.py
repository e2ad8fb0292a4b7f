"""Random requests of /v1/responses and /v1/messages: such as are served, and what becomes of them by a wrong value.

They are greedy or carry a seed, so the same request has the same answer, whole, streamed or in the background.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from models.training.chat_world import examples
from tests.engines.torch.schemas import make_schemas

Body = dict[str, Any]
KINDS = ("sum", "json", "tool", "thought", "fact", "repeat", "count", "two_turns", "tool_answer")
STOPS = (["7"], ["plam", "\n"])
WORDS = ("", "x", "Say plam.", "ünï 🙂", "a\nb\tc", '{"a": 1}', "<think>", "</tool_call>", "<|im_end|>")
WRONG: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 2**70, 1e300, 0.5, "", "x", "\x00", "\ud800", "auto", "none", [], [[]], [None], {},
    {"": 1}, {"type": "x"}, {"type": "function"}, {"type": "image"}, [{"role": "user", "content": "hi"}], "🙂" * 300,
)  # fmt: skip


def response_bodies(count: int, seed: int) -> Iterator[Body]:
    """Yield requests of /v1/responses, all of which are served."""
    rng, schemas = random.Random(seed), make_schemas(count, seed)
    for task, schema in zip(examples(seed, count, True, KINDS), schemas, strict=True):
        body: Body = {"model": "tiny-chat", "input": _items(rng, task.messages), **_shared(rng)}
        body |= {"max_output_tokens": rng.choice((1, 7, 60)), "seed": rng.randrange(1 << 31)}
        tools = [{"type": "function", "strict": rng.random() < 0.5, **tool["function"]} for tool in task.tools]
        if tools:
            body |= {"tools": tools, **_some(rng, parallel_tool_calls=rng.random() < 0.5)}
            name = rng.choice(tools)["name"]
            named = {"type": "function", "name": name}
            allowed = {"type": "allowed_tools", "mode": rng.choice(("auto", "required")), "tools": [named]}
            body |= _some(rng, tool_choice=rng.choice(("auto", "none", "required", named, allowed)))
        else:
            form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
            forms = ({"type": "text"}, {"type": "json_object"}, form)
            body |= _some(rng, text={"format": rng.choice(forms), "verbosity": "medium"})
        body |= _some(rng, reasoning=_some(rng, effort=rng.choice(("none", "low", "high")), summary="auto"))
        included = _some(rng, **{"message.output_text.logprobs": 1, "reasoning.encrypted_content": 1})
        body |= _some(rng, include=list(included))
        if "message.output_text.logprobs" in body.get("include", ()):
            body |= _some(rng, top_logprobs=rng.randint(0, 5))
        body |= _some(
            rng, instructions=rng.choice(WORDS), metadata={"a": "b"}, truncation=rng.choice(("auto", "disabled")),
            store=rng.random() < 0.5, user="me", safety_identifier="me", prompt_cache_key="key", max_tool_calls=3,
            service_tier=rng.choice(("auto", "default")), temperature=rng.choice((0, 0.7, 1.5)), presence_penalty=0.5,
            frequency_penalty=-0.5, logit_bias={"5": -3}, stop=rng.choice(STOPS),
        )  # fmt: skip
        yield _without_contradiction(body)


def message_bodies(count: int, seed: int) -> Iterator[Body]:
    """Yield requests of /v1/messages, all of which are served."""
    rng, schemas = random.Random(seed), make_schemas(count, seed)
    for task, schema in zip(examples(seed, count, True, KINDS), schemas, strict=True):
        system = [message["content"] for message in task.messages if message["role"] == "system"]
        body: Body = {"model": "tiny-chat", "messages": _turns(rng, task.messages), **_shared(rng)}
        body["max_tokens"] = rng.choice((1, 7, 60))
        if system:
            body["system"] = rng.choice((system[0], [{"type": "text", "text": system[0]}]))
        if functions := [tool["function"] for tool in task.tools]:
            body["tools"] = [
                {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
                for one in functions
            ]
            choice: Body = {"type": rng.choice(("auto", "any", "tool", "none"))}
            if choice["type"] == "tool":
                choice["name"] = functions[0]["name"]
            body |= _some(rng, tool_choice=choice | _some(rng, disable_parallel_tool_use=True))
        elif rng.random() < 0.5:
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        thinking = ({"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024})
        body |= _some(rng, thinking=rng.choice(thinking) | _some(rng, display=rng.choice(("summarized", "omitted"))))
        body |= _some(
            rng, stop_sequences=rng.choice(STOPS), metadata={"user_id": "me"},
            service_tier=rng.choice(("auto", "standard_only")),
        )  # fmt: skip
        yield _without_contradiction(body)


def spoiled(body: Body, seed: int) -> Any:
    """Return the request with one to three of its values, at any depth, replaced, removed or joined by another."""
    rng, body = random.Random(seed), copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        holder: Any = body
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(holder[key], (dict, list)) and rng.random() < 0.7:
                holder = holder[key]
                continue
            act, wrong = rng.randrange(4), copy.deepcopy(rng.choice(WRONG))
            if act == 0:
                del holder[key]
            elif act == 1 and isinstance(holder, dict):
                holder[rng.choice(("x", "type", "id", "role", "content", "cache_control"))] = wrong
            elif act == 2 and isinstance(holder, list):
                holder.extend(holder * rng.randint(1, 3))
            else:
                holder[key] = wrong
            break
    return body


def _some(rng: random.Random, **fields: Any) -> Body:
    """Return about a third of the fields."""
    return {name: value for name, value in fields.items() if rng.random() < 0.35}


def _shared(rng: random.Random) -> Body:
    """Return what both kinds of request take."""
    return _some(
        rng, top_p=rng.choice((0.1, 1)), top_k=rng.choice((-1, 5)), min_p=0.05, repetition_penalty=1.1,
        ignore_eos=True, min_tokens=1, cache_salt="salt", priority=rng.randint(-2, 2),
    )  # fmt: skip


def _without_contradiction(body: Body) -> Body:
    """A guide says where an answer ends."""
    if {"tools", "text", "output_config"} & body.keys():
        body.pop("ignore_eos", None)
    return body


def _items(rng: random.Random, messages: list[Body]) -> str | list[Body]:
    """Return a conversation as items of a response's input."""
    if len(messages) == 1 and rng.random() < 0.5:
        return str(messages[0]["content"])
    items: list[Body] = []
    for message in messages:
        role, text = message["role"], message.get("content") or ""
        for at, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            arguments = json.dumps(function["arguments"])
            items.append(
                {"type": "function_call", "call_id": f"call_{at}", "name": function["name"], "arguments": arguments}
            )
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": "call_0", "output": text})
        elif text and rng.random() < 0.5:
            kind = "output_text" if role == "assistant" else "input_text"
            items.append({"type": "message", "role": role, "content": [{"type": kind, "text": text}]})
        elif text:
            items.append({"role": role, "content": text})
        if role == "assistant" and rng.random() < 0.3:
            items.insert(-1, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]})
    return items


def _turns(rng: random.Random, messages: list[Body]) -> list[Body]:
    """Return a conversation as turns of a message's."""
    turns: list[Body] = []
    for message in messages:
        role, text = message["role"], message.get("content") or ""
        if role == "system":
            continue
        blocks: list[Body] = [{"type": "text", "text": text}] if text else []
        if role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": "toolu_0", "content": rng.choice((text, blocks))}]
        if role == "assistant" and rng.random() < 0.3:
            blocks.insert(0, {"type": "thinking", "thinking": "hm", "signature": "unsigned"})
        for at, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            blocks.append(
                {"type": "tool_use", "id": f"toolu_{at}", "name": function["name"], "input": function["arguments"]}
            )
        is_plain = role != "tool" and text and len(blocks) == 1 and rng.random() < 0.5
        turns.append({"role": "user" if role == "tool" else role, "content": text if is_plain else blocks})
    return turns
