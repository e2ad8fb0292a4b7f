"""What a campaign asks, and the only right answer to each question.

The mocker's answers are known by arithmetic. Of a real model they are what the launch answers before the first
fault, alone and in order: then every way, every worker and every move must give the same tokens, also those that
are sampled with a seed.
"""

from __future__ import annotations

import json
import random
import urllib.request
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.load.http_streams import tensors_of
from benchmarks.load.workload import Prompt, Workload, tokenizer_text

LENGTHS = (6, 40, 120)  # tokens: some requests are short, some meet more than one fault
PROBE_TOKENS = 3
NUM_QUESTIONS, NUM_PROBES = 24, 12

Answer = Callable[[Prompt], Sequence[int]]  # a prompt without its answer -> the answer's tokens


def make_questions(model: str, answer: Answer, seed: int, count: int = NUM_QUESTIONS) -> dict[str, Workload]:
    """Return `chat`, `text`, `chat_probe` and `text_probe`: conversations, plain texts, and short ones of both.

    `count`: of conversations, and of texts.
    """
    from bireme.text.tokenizer import load_tokenizer

    tokenizer, to_text, rng = load_tokenizer(model), tokenizer_text(model), random.Random(seed)

    def ask(number: int, is_chat: bool, length: int) -> Prompt:
        message = f"Question {number}: " + " ".join(rng.choice(_WORDS) for _ in range(rng.randint(4, 40)))
        if is_chat:
            ids = tokenizer.encode_chat(tokenizer.render_chat([{"role": "user", "content": message}]))
        else:
            ids = tokenizer.encode(message)
        seeded = None if number % 3 else rng.randrange(1 << 31)
        return Prompt(tuple(ids), array("i", [0] * length), None, message, seed=seeded)

    kinds = {"chat": (count, 0), "text": (count, 0), "chat_probe": (NUM_PROBES, PROBE_TOKENS)}
    kinds["text_probe"] = kinds["chat_probe"]
    found = {}
    for kind, (number, length) in kinds.items():
        asked = [ask(n, kind.startswith("chat"), length or LENGTHS[n % len(LENGTHS)]) for n in range(number)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(answer, asked))
        answered = tuple(
            replace(prompt, expected=array("i", ids), text=to_text(ids))
            for prompt, ids in zip(asked, answers, strict=True)
        )
        found[kind] = Workload(answered, max(LENGTHS))
    return found


def mocker_answer(model: str) -> Answer:
    from bireme.engines.mocker.tokens import expected_tokens, printable_ids

    ids, _ = printable_ids(model)
    return lambda prompt: expected_tokens(prompt.ids, len(prompt.expected), ids)


def served_answer(http: str) -> Answer:
    """Ask a launch that nothing disturbs."""

    def ask(prompt: Prompt) -> list[int]:
        url = f"http://{http}/v2/models/completion/generate"
        request = urllib.request.Request(url, json.dumps(tensors_of(prompt)).encode())
        with urllib.request.urlopen(request, timeout=120) as reply:
            ids: list[int] = json.load(reply)["output_ids"]
        if len(ids) != len(prompt.expected):
            raise RuntimeError(f"{len(ids)} tokens came, {len(prompt.expected)} were asked for; nothing had gone wrong")
        return ids

    return ask


def save(questions: dict[str, Workload], path: Path) -> None:
    path.write_text(json.dumps({kind: [_to_json(p) for p in load.prompts] for kind, load in questions.items()}))


def load(path: str) -> dict[str, Workload]:
    kinds = json.loads(Path(path).read_text())
    return {kind: Workload(tuple(map(_from_json, items)), max(LENGTHS)) for kind, items in kinds.items()}


def _to_json(prompt: Prompt) -> dict[str, Any]:
    return {"ids": prompt.ids, "expected": list(prompt.expected), "text": prompt.text} | {
        "message": prompt.message,
        "seed": prompt.seed,
    }


def _from_json(item: dict[str, Any]) -> Prompt:
    return Prompt(**(item | {"ids": tuple(item["ids"]), "expected": array("i", item["expected"])}))


_WORDS = "oar bank ship wind sail rope mast crew port star tide hull deck rows keel helm gulf reef swim salt".split()
