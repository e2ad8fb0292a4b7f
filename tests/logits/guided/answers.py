"""What answers a grammar lets through, byte by byte, by the compile process' own code."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from bireme.logits.guided.compile_process import Compiler

_EOS = 256
_CLOSING = b'"}],:'


class Grammars:
    """Compiles for a vocabulary of single bytes without control characters, as guides of JSON are."""

    def __init__(self) -> None:
        from xgrammar import TokenizerInfo

        tokens = [bytes([at]) if at > 31 else b"" for at in range(256)]
        self._info = TokenizerInfo([*tokens, b"<eos>"], vocab_size=257, stop_token_ids=[_EOS])
        self._compiler = Compiler()

    def compile(self, kind: str, tree: Any) -> bytes:
        request = {"view": "json", "info": self._info.serialize_json(), "kind": kind, "any_whitespace": False}
        return self._compiler.answer({**request, "text": json.dumps(tree)})

    def of(self, schema: Any) -> Any:
        """Return the compiled grammar. Raises ValueError with the refusal."""
        from xgrammar import CompiledGrammar

        answer = self.compile("json", schema)
        if answer[:1] != b"+":
            raise ValueError(answer[1:].decode())
        return CompiledGrammar.deserialize_json(answer[1:].decode(), self._info)

    def can_be(self, grammar: Any, text: str) -> bool:
        from xgrammar import GrammarMatcher

        matcher = GrammarMatcher(grammar)
        return all(matcher.accept_token(byte) for byte in text.encode()) and bool(matcher.accept_token(_EOS))

    def answer(self, grammar: Any, rng: random.Random, max_bytes: int = 300) -> str | None:
        """Return a random answer, drawn so that it comes to an end; None if it did not, or has half a character."""
        from xgrammar import GrammarMatcher

        matcher, mask, taken = GrammarMatcher(grammar), np.zeros((1, 9), dtype=np.int32), bytearray()
        for at in range(max_bytes):
            matcher.fill_next_token_bitmask(mask, 0)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:257]).tolist()
            if allowed[-1] == _EOS and (allowed == [_EOS] or at > 60 or rng.random() < 0.3):
                return _decoded(bytes(taken))
            byte = rng.choice(_likely([one for one in allowed if one != _EOS], rng, is_late=at > 40))
            assert matcher.accept_token(byte)
            taken.append(byte)
        return None


def _likely(allowed: list[int], rng: random.Random, is_late: bool) -> list[int]:
    closing = [byte for byte in allowed if byte in _CLOSING]
    if closing and rng.random() < (0.8 if is_late else 0.3):
        return closing
    plain = [byte for byte in allowed if byte < 128]
    return plain if plain and rng.random() < 0.85 else allowed


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:  # a surrogate: guidance.py keeps them out
        return None
