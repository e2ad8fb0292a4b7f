"""What is asked and what must come back: prompts of random ids with the mocker's answer to each.

Every slot of a load uses prompts of its own, so that two streams mixed up are as visible as a lost token.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Expect = Callable[[Sequence[int], int], Sequence[int]]  # prompt ids, how many tokens -> the tokens
TEMPERATURE = 0.8
TokensToText = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and the only right answer to it."""

    ids: tuple[int, ...]
    expected: array[int]  # int32
    text: str | None  # of `expected`; None: not known, not checked
    message: str = ""  # of a chat: `ids` is its prompt
    pieces: tuple[str, ...] = ()  # of a chat: the text of each expected token
    seed: int | None = None  # sampled with this seed at TEMPERATURE; None: greedy

    @property
    def ids_bytes(self) -> bytes:
        return array("i", self.ids).tobytes()


@dataclass(frozen=True, slots=True)
class Workload:
    prompts: tuple[Prompt, ...]
    max_tokens: int

    def prompt(self, slot: int, turn: int) -> Prompt:
        """Return the prompt of a slot's turn: each slot walks the prompts from a place of its own."""
        return self.prompts[(slot + turn * 31) % len(self.prompts)]


def make_workload(
    expect: Expect,
    *,
    num_prompts: int,
    prompt_tokens: int = 64,
    max_tokens: int = 128,
    vocab_size: int = 1000,
    to_text: TokensToText | None = None,
    seed: int = 1,
) -> Workload:
    """Make random prompts (the same for the same seed) with their expected answers."""
    rng = random.Random(seed)
    return Workload(
        tuple(
            _make_prompt(tuple(rng.randrange(vocab_size) for _ in range(prompt_tokens)), max_tokens, expect, to_text)
            for _ in range(num_prompts)
        ),
        max_tokens,
    )


def _make_prompt(ids: tuple[int, ...], max_tokens: int, expect: Expect, to_text: TokensToText | None) -> Prompt:
    expected = expect(ids, max_tokens)
    return Prompt(ids, array("i", expected), to_text(expected) if to_text else None)


def make_chat_workload(expect: Expect, model_path: str, *, num_prompts: int, max_tokens: int) -> Workload:
    """Make conversations of one message each, with the expected answers token by token."""
    from bireme.text.tokenizer import load_tokenizer

    tokenizer, to_text = load_tokenizer(model_path), tokenizer_text(model_path)

    def make(number: int) -> Prompt:
        message = f"Stream {number}: " + "two banks of oars " * 6
        ids = tokenizer.encode_chat(tokenizer.render_chat([{"role": "user", "content": message}]))
        expected = array("i", expect(ids, max_tokens))
        detokenizer = tokenizer.detokenizer()
        pieces = tuple(detokenizer.push([token]) for token in expected)
        return Prompt(tuple(ids), expected, to_text(expected), message, pieces)

    return Workload(tuple(make(number) for number in range(num_prompts)), max_tokens)


def tokenizer_text(model_path: str | Path) -> TokensToText:
    """Return the Hugging Face tokenizer's own decoding of whole answers: an oracle apart from bireme's detokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
