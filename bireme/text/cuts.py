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
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import AddedToken, models

from bireme.text.token_lengths import parts_of, state_of

_WORD = "(?<=[A-Za-z]) (?=[A-Za-z])"
_MAX_TOKENS = 256  # added tokens that are looked for
_MARKERS = ("\u0120", "\u2581")  # a space, in byte-level vocabularies and in SentencePiece's
_CROSSED = re.compile(f"[A-Za-z][{''.join(_MARKERS)} ]")
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
    """Return what to look for in texts for a `tokenizers.Tokenizer`: each match begins at a place to cut at.

    None: no place is certain.
    """
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


def _separators(added: list[AddedToken]) -> Iterable[str]:
    """Return the added tokens that are found in any text, whatever stands before them.

    None that another may contain or overlap, or that looks at its neighbors; nor one that begins with a letter: a
    token that must be a word of its own would look at it.
    """
    texts = [token.content for token in added]
    joined = "\0".join(texts)
    ends = {text[at:] for text in texts for at in range(1, len(text))}
    for token in [token for token in added if token.special and not token.normalized][:_MAX_TOKENS]:
        text = token.content
        if token.lstrip or token.rstrip or token.single_word or not text or text[0].isalnum() or text[0] in "_ ":
            continue
        if joined.count(text) == 1 and not any(text[:at] in ends for at in range(1, len(text) + 1)):
            yield text


def _splits_at_words(tokenizer: Any, added: list[AddedToken]) -> bool:
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.dropout:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return False  # these look at, or swallow, the blanks beside them
    if any(set(token.content) & {*string.whitespace, *_MARKERS} for token in added):
        return False
    splits = parts_of(state_of(tokenizer.pre_tokenizer), "pretokenizers")
    normalizers = parts_of(state_of(tokenizer.normalizer), "normalizers")
    marks_spaces = any(part["type"] == "Replace" for part in normalizers)
    has_regex = any(part["type"] == "Split" or part.get("use_regex") for part in splits)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return (
        all(map(_is_local, normalizers))
        and all(_keeps_words(part, marks_spaces) for part in splits)
        and (has_regex or not model.ignore_merges)  # a whole text may be a token
        and any(marker in vocabulary for marker in _MARKERS)  # else unknown characters may be fused over it
        and not any(map(_CROSSED.search, vocabulary))
    )


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
