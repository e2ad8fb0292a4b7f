"""How much text a token can stand for: longer texts than that times the context can't fit and need no encoding.

Only where it is certain: byte-pair encoding with a token for each byte, and nothing around it that drops text, as a
pre-tokenizer may, or an added token that swallows the blanks beside it.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import models

from bireme.text import vocabulary

_NFC_SHRINKS = 4  # at most, and rounded up: a Kelvin sign (3 bytes) becomes K, three Hangul letters (9) a syllable (3)
_KEEP_ALL = {"ByteLevel", "Digits", "Metaspace"}  # pre-tokenizers


def longest_token_bytes(tokenizer: Any) -> int | None:
    """Return the most bytes of a text that one token of a `tokenizers.Tokenizer` can stand for; None: not certain."""
    shrinks = _shrinks(state_of(tokenizer.normalizer))
    splits = parts_of(state_of(tokenizer.pre_tokenizer), "pretokenizers")
    added = tokenizer.get_added_tokens_decoder().values()
    if not is_plain_bpe(tokenizer.model) or shrinks is None or not all(map(_keeps_all, splits)):
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    longest = _longest(tokenizer.get_vocab(with_added_tokens=True), splits, tokenizer.model.byte_fallback)
    return shrinks * longest if longest else None


def is_plain_bpe(model: Any) -> bool:
    """Whether a model is byte-pair encoding whose tokens stand for their own characters, wherever in a word."""
    if not isinstance(model, models.BPE):
        return False
    return not model.continuing_subword_prefix and not model.end_of_word_suffix


def _longest(vocab: dict[str, int], splits: list[dict[str, Any]], has_fallback: bool) -> int:
    """Return the bytes of the longest token; 0: some byte has no token."""
    bytes_of: vocabulary.TokenBytes
    if any(split["type"] == "ByteLevel" for split in splits):
        needed, bytes_of = [*vocabulary.byte_characters()], vocabulary.byte_level
    elif has_fallback:
        needed, bytes_of = [f"<0x{byte:02X}>" for byte in range(256)], str.encode
    else:
        return 0
    return max(len(bytes_of(token)) for token in vocab) if vocab.keys() >= set(needed) else 0


def state_of(part: Any) -> dict[str, Any] | None:
    """Return the settings of a normalizer or pre-tokenizer; None: there is none."""
    return json.loads(part.__getstate__()) if part else None


def parts_of(state: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the parts of a sequence, which stand under `name`, or the one that there is."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [part for inner in state[name] for part in parts_of(inner, name)]


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """Return how many bytes at most become one; None: not known."""
    factor = 1
    for part in parts_of(normalizer, "normalizers"):
        if part["type"] == "NFC":
            factor *= _NFC_SHRINKS
        elif part["type"] == "Replace":
            old = part["pattern"].get("String")
            if old is None or len(old.encode()) > len(part["content"].encode()):
                return None
        elif part["type"] != "Prepend":
            return None
    return factor


def _keeps_all(split: dict[str, Any]) -> bool:
    return split["type"] in _KEEP_ALL or (split["type"] in ("Split", "Punctuation") and split["behavior"] != "Removed")
