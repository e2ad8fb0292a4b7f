"""Control tokens: which texts a tokenizer reads as such, and a shield that keeps them out of what callers send.

A model's file lists added tokens: marks of turns, calls and thoughts, special or not, but also runs of blanks, HTML
tags and words, which are ordinary text. A template writes the marks; the same characters in what a caller sends must
stay characters. The shield puts numbers that nobody can know in their place before rendering, and what is rendered is
cut there.

A mark may also come about where two texts meet: of two parts of a message, or of `<`, which a template writes before a
name, and the name. There the shield puts a cut with nothing in it.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import msgspec

from bireme.text.token_lengths import parts_of, state_of

_BRACKETS = frozenset("<>[]{}|\uff5c")
_HTML = (
    "a abbr b big blockquote br caption center cite code col colgroup dd del div dl dt em h1 h2 h3 h4 h5 h6 hr i ins"
    " kbd li mark ol p pre q s samp small span strike strong sub sup table tbody td tfoot th thead tr tt u ul var"
)
_HTML_TAG = re.compile(f"</?(?:{'|'.join(_HTML.split())}) ?/?>")
_THOUGHTS = re.compile("think|thought|reason", re.IGNORECASE)
_MAX_CLEAN = 1024  # lists of tools that are remembered
_NONCE_DIGITS, _NUMBER_DIGITS = 20, 8
# What templates look at, or compare with: these begin no mark
_WORDS = frozenset(
    "role content name type text image function arguments parameters description properties required items enum id"
    " tool_calls tool_call_id reasoning_content thinking reasoning system user assistant tool developer object string"
    " integer number boolean array null".split()
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt; `pieces` alternate between text with control tokens and text without."""

    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ControlTokens:
    """The texts of a tokenizer's control tokens."""

    def __init__(self, texts: Iterable[str] = (), normalize: Callable[[str], str] | None = None) -> None:
        """`normalize`: what is done to a text before tokens are looked for in it."""
        self.texts = sorted({*texts} - {""})
        self._normalize = normalize
        self.pattern = _any_of(self.texts)
        self._firsts = tuple({text[0] for text in self.texts})
        self._beginnings = _any_of(self._firsts)
        self._longest = max(map(len, self.texts), default=0)

    @classmethod
    def of(cls, tokenizer: Any, names: Iterable[str] = (), templates: Iterable[str] = ()) -> ControlTokens:
        """Return those of a `tokenizers.Tokenizer`. `names`: bos, eos and the like; `templates`: their sources."""
        names, templates = frozenset(names), tuple(templates)
        tokens = [
            token
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special or token.content in names or _is_control(token.content, templates)
        ]
        texts = {token.content for token in tokens}
        normalized = {token.content for token in tokens if token.normalized}
        normalizer = tokenizer.normalizer
        if not normalized or not parts_of(state_of(normalizer), "normalizers"):
            return cls(texts)
        return cls(texts | set(map(normalizer.normalize_str, normalized)), normalizer.normalize_str)

    def may_be_in(self, text: str) -> bool:
        """Whether one may be in the text, or begin at its end: by a look that costs next to nothing."""
        if self._normalize is not None:
            return True
        for first in self._firsts:  # any() costs more than all the rest
            if first in text:
                return True
        return False

    def normalized(self, text: str) -> str:
        """Return the text; normalized, where that makes a control token of it."""
        if self._normalize is None or (normalized := self._normalize(text)) == text:
            return text
        assert self.pattern is not None
        return normalized if self.pattern.search(normalized) or self.is_begun(normalized) else text

    def is_begun(self, text: str) -> bool:
        """Whether the text ends with the beginning of a control token."""
        tail = text[-self._longest :]
        if self._beginnings is None or self._beginnings.search(tail) is None:
            return False
        return any(_begins_one(self.texts, tail[at.start() :]) for at in self._beginnings.finditer(tail))

    def fragments(self, text: str) -> list[str]:
        """Cut the text of a control token so that no fragment is one."""
        fragments = [text[:1], text[1:]]
        if self.pattern is not None and any(map(self.pattern.search, fragments)):
            return list(text)
        return fragments

    def pieces(self, text: str) -> Prompt:
        """Return a text in which nothing is a control token."""
        if self.pattern is None:
            return Prompt((text,))
        return Prompt(tuple(re.split(f"({self.pattern.pattern})", self.normalized(text))))


class TemplateTexts:
    """What a chat template writes itself, and looks for in messages, as its control tokens concern it."""

    def __init__(self, controls: ControlTokens, literals: Iterable[str], separators: Iterable[str]) -> None:
        """`literals`: all strings in the template; `separators`: those by which it takes messages apart."""
        self.controls = controls
        self._rests = sorted(set(_rests(controls.texts, literals)))
        self._rest = _any_of(self._rests)
        self.has_joints = self._rest is not None
        kept = {text for text in separators if _THOUGHTS.search(text)} & set(controls.texts)
        self.thought_marks = _any_of(kept)
        self.clean_tools: set[bytes] = set()  # hashes

    def is_ended(self, text: str) -> bool:
        """Whether the text may go on with a control token that the template has begun."""
        if self._rest is None or text in _WORDS:
            return False
        return _begins_one(self._rests, text) or self._rest.match(text) is not None


class Shield:
    """Replaces control tokens in one request's strings by marks that nobody can know, and back."""

    def __init__(self, template: TemplateTexts) -> None:
        self._template, self._controls = template, template.controls
        self._nonce = ""
        self._strings: list[str] = []

    def is_plain(self, value: Any) -> bool:
        """Whether a look tells that this is a string with nothing to protect."""
        if type(value) is not str or self._controls.may_be_in(value):
            return False
        return not self._template.has_joints or not value or not self._template.is_ended(value.lstrip())

    def protect(self, value: Any) -> Any:
        """Return JSON data without control tokens."""
        if self._controls.pattern is None:
            return value
        kind = type(value)
        if kind is str:
            return self._text(value)
        if kind is list:
            return [self.protect(item) for item in value]
        if kind is dict:
            return {self._text(key): self.protect(item) for key, item in value.items()}
        return value

    def protect_answer(self, content: Any) -> Any:
        """Protect an assistant's content, but for the thought marks by which the template takes it apart."""
        marks = self._template.thought_marks
        if marks is None:
            return self.protect(content)
        if isinstance(content, list):
            return [self._answer_part(part) for part in content]
        if not isinstance(content, str) or marks.search(content) is None:
            return self.protect(content)
        parts = re.split(f"({marks.pattern})", content)
        return "".join(self._text(part) if at % 2 == 0 else part for at, part in enumerate(parts))

    def _answer_part(self, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {**self.protect({**part, "text": ""}), "text": self.protect_answer(part["text"])}
        return self.protect(part)

    def _text(self, text: str) -> str:
        controls = self._controls
        if controls.may_be_in(text):
            assert controls.pattern is not None
            text = controls.pattern.sub(lambda match: self.mark_of(match.group()), controls.normalized(text))
            if controls.is_begun(body := text.rstrip()):
                text = body + self.mark_of("") + text[len(body) :]
        if self._template.has_joints and text and self._template.is_ended(body := text.lstrip()):
            text = text[: len(text) - len(body)] + self.mark_of("") + body
        return text

    def mark_of(self, string: str) -> str:
        """Return what stands for a string: digits alone, which nothing that templates do to a text changes."""
        self._nonce = self._nonce or f"{secrets.randbelow(10**_NONCE_DIGITS):0{_NONCE_DIGITS}}"
        self._strings.append(string)
        return f"{self._nonce}{len(self._strings) - 1:0{_NUMBER_DIGITS}}"

    def protect_tools(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Protect what comes with each request of a conversation; tools that were clean before are so again."""
        if self._controls.pattern is None:
            return tools
        try:
            key = hashlib.sha256(msgspec.json.encode(tools)).digest()
        except UnicodeEncodeError:  # lone surrogates
            return [self.protect(tool) for tool in tools]
        clean = self._template.clean_tools
        if key in clean:
            return tools
        num_before = len(self._strings)
        protected = [self.protect(tool) for tool in tools]
        if len(self._strings) == num_before:
            if len(clean) >= _MAX_CLEAN:
                clean.clear()
            clean.add(key)
        return protected

    def restore(self, text: str) -> Prompt:
        if not self._strings:
            return Prompt((text,))
        pieces = re.split(f"{self._nonce}([0-9]{{{_NUMBER_DIGITS}}})", text)
        return Prompt(tuple(piece if at % 2 == 0 else self._strings[int(piece)] for at, piece in enumerate(pieces)))


def _is_control(text: str, templates: tuple[str, ...]) -> bool:
    """Whether an added token that its file does not call special is one all the same."""
    if not any(map(str.isalnum, text)) or _HTML_TAG.fullmatch(text):
        return False
    is_word = all(character.isalnum() or character.isspace() for character in text)
    return not _BRACKETS.isdisjoint(text) or (not is_word and any(text in source for source in templates))


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return what finds the longest of these texts. A tree: a file may list thousands with the same beginning."""
    texts = tuple(sorted(texts))
    return _compiled(texts) if texts else None


@functools.lru_cache(maxsize=64)
def _compiled(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(_tree(list(texts)))


def _tree(texts: list[str]) -> str:
    """Return a regular expression for sorted texts, one branch for each next character."""
    is_optional = texts[0] == ""
    groups: dict[str, list[str]] = {}
    for text in texts[is_optional:]:
        groups.setdefault(text[0], []).append(text)
    branches = []
    for group in groups.values():
        common = commonprefix(group)
        rests = [text[len(common) :] for text in group]
        branches.append(re.escape(common) + (_tree(rests) if rests != [""] else ""))
    if len(branches) == 1 and not is_optional:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if is_optional else ''}"


def _begins_one(texts: list[str], text: str) -> bool:
    """Whether one of the sorted texts goes on after `text`."""
    at = bisect_left(texts, text)
    at += at < len(texts) and texts[at] == text
    return at < len(texts) and texts[at].startswith(text)


def _rests(texts: list[str], literals: Iterable[str]) -> Iterator[str]:
    """Yield what is left of control tokens whose beginnings stand at the end of a literal."""
    by_beginning: dict[str, list[str]] = {}
    for text in texts:
        for at in range(1, len(text)):
            by_beginning.setdefault(text[:at], []).append(text[at:])
    longest = max(map(len, texts), default=0)
    for literal in literals:
        for at in range(1, min(len(literal), longest) + 1):
            yield from by_beginning.get(literal[-at:], ())
