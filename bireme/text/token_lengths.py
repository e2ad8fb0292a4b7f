"""How much text a token can stand for: longer texts than that times the context can't fit and need no encoding.

Only where it is certain: byte-pair encoding with a token for each byte, and nothing around it that drops text.
Otherwise there is no bound: a pre-tokenizer may remove blanks, an unknown word of any length may be one token, and an
added token may swallow the blanks beside it.
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
    model = tokenizer.model
    shrinks = _shrinks(state_of(tokenizer.normalizer))
    splits = parts_of(state_of(tokenizer.pre_tokenizer), "pretokenizers")
    added = tokenizer.get_added_tokens_decoder().values()
    if (
        not isinstance(model, models.BPE)
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
        or shrinks is None
        or not all(_keeps_all(split) for split in splits)
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    is_byte_level = any(split["type"] == "ByteLevel" for split in splits)
    if is_byte_level and all(character in vocab for character in vocabulary.byte_characters()):
        longest = max(len(vocabulary.byte_level(token)) for token in vocab)
    elif not is_byte_level and model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        longest = max(len(token.encode()) for token in vocab)
    else:
        return None
    return shrinks * longest


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
