"""Questions about pictures of tiny-vlm's world: for a chat client, and for plain transformers."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from models.training.picture_world import Dialogue, dialogues, png

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-vlm"
KINDS = ("colour", "shape", "position", "at", "count", "describe", "two", "fact")
MAX_TOKENS = 100


def held_out(count: int, kinds: tuple[str, ...] = KINDS) -> list[Dialogue]:
    return [dialogue for kind in kinds for dialogue in dialogues(99, count, True, kind)]


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def picture_part(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def chat_messages(dialogue: Dialogue) -> list[dict[str, Any]]:
    """Return the first question as OpenAI's messages."""
    pictures = dialogue.pictures()
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else picture_part(png(pictures[part]))
        for part in dialogue.parts
    ]
    system = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
    return [*system, {"role": "user", "content": content}]


def answers_of_transformers(asked: list[Dialogue], path: Path = MODEL) -> list[str]:
    """Return plain transformers' greedy answers in fp32, one at a time."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(path)
    answers = []
    for dialogue in asked:
        prompt = processor.apply_chat_template(dialogue.messages(1), add_generation_prompt=True, tokenize=False)
        inputs = processor(text=prompt, images=dialogue.pictures() or None, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.tokenizer.decode(new, skip_special_tokens=True))
    return answers


def num_right(asked: list[Dialogue], answers: list[str]) -> int:
    return sum(answer.strip() == one.turns[0].answer for one, answer in zip(asked, answers, strict=True))
