"""The text of every token, as a table: what tokenizers' decoders do, where each token is decoded on its own.

That holds for byte-level BPE (Llama 3, Qwen, GPT) and SentencePiece forms (Llama 2, Mistral, Gemma): their decoders map
each token to bytes, and only UTF-8 joins them. Other decoders (WordPiece and the like) have no table.

A SentencePiece decoder drops the first space of a text; generated text follows a prompt, so here it stays.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from bireme.errors import ConfigError

TokenBytes = Callable[[str], bytes]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Texts by token id: complete UTF-8 in `texts`, None where a token holds parts of characters (`parts`)."""

    __slots__ = ("parts", "texts")

    def __init__(self, texts: list[str | None], parts: dict[int, bytes]) -> None:
        self.texts = texts
        self.parts = parts

    def without(self, ids: frozenset[int]) -> Vocabulary:
        """Return a vocabulary in which these tokens have no text."""
        texts = list(self.texts)
        for token in ids:
            texts[token] = ""
        return Vocabulary(texts, {token: part for token, part in self.parts.items() if token not in ids})


def build(tokenizer: Any) -> Vocabulary | None:
    """Tabulate a `tokenizers.Tokenizer`; None when its decoder looks at more than one token."""
    decoder = tokenizer.decoder
    token_bytes = _token_bytes(json.loads(decoder.__getstate__()) if decoder else None)  # its JSON, as when pickled
    if token_bytes is None:
        return None
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise ConfigError("tokenizer.json: its vocabulary is empty")
    texts: list[str | None] = [""] * (max(vocab.values()) + 1)
    parts: dict[int, bytes] = {}
    for token, token_id in vocab.items():
        data = token_bytes(token)
        try:
            texts[token_id] = data.decode()
        except UnicodeDecodeError:
            texts[token_id] = None
            parts[token_id] = data
    return Vocabulary(texts, parts)


def _token_bytes(decoder: dict[str, Any] | None) -> TokenBytes | None:
    """Return what one token contributes under this decoder; None when it depends on others."""
    if decoder is None:
        return None
    kind = decoder["type"]
    if kind == "ByteLevel":
        return byte_level
    if kind == "Metaspace":
        return functools.partial(_sentence_piece, [(decoder.get("replacement", "▁"), " ")], False)
    if kind == "Sequence":
        return _sequence(decoder["decoders"])
    return None


def _sequence(decoders: list[dict[str, Any]]) -> TokenBytes | None:
    kinds = [decoder["type"] for decoder in decoders]
    if kinds == ["ByteLevel"]:
        return byte_level
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return None
    replacements = []
    for decoder in decoders:
        if decoder["type"] == "Strip" and (decoder["content"] != " " or decoder["stop"]):
            return None
        if decoder["type"] == "Replace":
            if "String" not in decoder["pattern"]:
                return None
            replacements.append((decoder["pattern"]["String"], decoder["content"]))
    if "Fuse" in kinds and "Replace" in kinds[kinds.index("Fuse") :]:
        return None  # would replace across tokens
    return functools.partial(_sentence_piece, replacements, "ByteFallback" in kinds)


def _sentence_piece(replacements: list[tuple[str, str]], has_bytes: bool, token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
    if match:
        return bytes([int(match.group(1), 16)])
    for old, new in replacements:
        token = token.replace(old, new)
    return token.encode()


def byte_level(token: str) -> bytes:
    """Undo GPT-2's mapping of bytes to printable characters; a token with any other character is plain text."""
    table = byte_characters()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode()


@functools.cache
def byte_characters() -> dict[str, int]:
    """Return GPT-2's printable character of each byte -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + at): byte for at, byte in enumerate(others)}
