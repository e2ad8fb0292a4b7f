"""Where a long text can be cut so that the tokens of its parts, each encoded alone, are those of the whole.

Two kinds of places, each only where it is certain:

    before an added token     they are found first, in the raw text, and what is between two is encoded by itself
    between a letter and a space before a letter (ASCII)
                              neither the pre-tokenizer nor a token of the vocabulary goes over it, and the
                              normalizer works on either side alone
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any

from tokenizers import AddedToken

from bireme.text.token_lengths import is_plain_bpe, parts_of, state_of

_WORD = "(?<=[A-Za-z]) (?=[A-Za-z])"
_MAX_TOKENS = 256  # added tokens that are looked for
_MARKERS = ("\u0120", "\u2581")  # a space, in byte-level vocabularies and in SentencePiece's
_CROSSED = re.compile(f"[A-Za-z][{''.join(_MARKERS)} ]")
_BLANKS = {*string.whitespace, *_MARKERS}
_NO_WORD = re.compile(r"[^\w ]")  # a token that must be a word of its own would look at what begins with a letter
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# No match of these has a letter before a space, nor depends on what is before it or on more than the blanks after it.
KNOWN_SPLITS = frozenset(
    (
        rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}",  # Llama 3
        rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}",  # Qwen
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_REST}",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_REST}",  # gpt-oss
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_REST}",  # Mistral
        r"\p{N}{1,3}",  # DeepSeek, the first of three
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_REST}",
    )
)


def cut_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Return what each place to cut at begins with, for a `tokenizers.Tokenizer`; None: no place is certain."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    places = [re.escape(token) for token in _separators(added)]
    if _splits_at_words(tokenizer, added):
        places.append(_WORD)
    return re.compile("|".join(places)) if places else None


def cuts(text: str, pattern: re.Pattern[str], distance: int, at: int = 0) -> Iterator[int]:
    """Yield places to cut at, at least `distance` characters apart; the end of the text alone changes none of them.

    `at`: one of them, after which to go on.
    """
    while (match := pattern.search(text, at + distance)) is not None:
        at = match.start()
        yield at


def _separators(added: list[AddedToken]) -> Iterator[str]:
    """Yield the added tokens that are found in any text, and that no other one may contain or overlap."""
    texts = [token.content for token in added]
    joined = "\0".join(texts)
    ends = {text[at:] for text in texts for at in range(1, len(text))}
    for token in islice(filter(lambda token: token.special and not token.normalized, added), _MAX_TOKENS):
        text = token.content
        if _NO_WORD.match(text) and not _looks_beside(token):
            if joined.count(text) == 1 and ends.isdisjoint(accumulate(text)):
                yield text


def _looks_beside(token: AddedToken) -> bool:
    """Whether it looks at, or swallows, what is beside it."""
    return token.lstrip or token.rstrip or token.single_word


def _splits_at_words(tokenizer: Any, added: list[AddedToken]) -> bool:
    model = tokenizer.model
    if not is_plain_bpe(model) or model.dropout:
        return False
    if any(_looks_beside(token) or _BLANKS.intersection(token.content) for token in added):
        return False
    splits = parts_of(state_of(tokenizer.pre_tokenizer), "pretokenizers")
    normalizers = parts_of(state_of(tokenizer.normalizer), "normalizers")
    marks_spaces = any(part["type"] == "Replace" for part in normalizers)
    return (
        all(map(_is_local, normalizers))
        and all(_keeps_words(part, marks_spaces) for part in splits)
        and (not model.ignore_merges or any(map(_is_regex, splits)))  # else a whole text may be a token
        and _has_spaces_at_begins(tokenizer.get_vocab(with_added_tokens=False))
    )


def _is_regex(split: dict[str, Any]) -> bool:
    return bool(split["type"] == "Split" or split.get("use_regex"))


def _has_spaces_at_begins(vocabulary: dict[str, int]) -> bool:
    """Whether there is a space, so that no unknown characters are fused over it, and none behind a letter."""
    return not vocabulary.keys().isdisjoint(_MARKERS) and not any(map(_CROSSED.search, vocabulary))


def _is_local(normalizer: dict[str, Any]) -> bool:
    """Whether it gives a letter, and a space before a letter, the same whatever stands on the other side."""
    if normalizer["type"] == "Replace":
        return bool(normalizer["pattern"].get("String") == " " and normalizer["content"] == "\u2581")
    return bool(normalizer["type"] == "NFC")


def _keeps_words(split: dict[str, Any], marks_spaces: bool) -> bool:
    """`marks_spaces`: there are no spaces any more."""
    match split["type"]:
        case "ByteLevel":
            return not split["add_prefix_space"]
        case "Metaspace":
            return bool(split["replacement"] == "\u2581")
        case "Digits":
            return True
        case "Split":
            if marks_spaces and split["pattern"] == {"String": " "}:
                return True
            return (
                split["pattern"].get("Regex") in KNOWN_SPLITS
                and split["behavior"] == "Isolated"
                and not split["invert"]
            )
    return False
