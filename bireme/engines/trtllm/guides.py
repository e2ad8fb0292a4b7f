"""From a checked guide to GuidedDecodingParams' keyword arguments: exactly one field, or a refusal with its reason.

TensorRT-LLM compiles a JSON schema with any amount of white space between its parts, which a model can fill its whole
answer with. Here a schema becomes a grammar of one layout first, as in the embedded engine (unless
`guided_decoding_config.any_whitespace` is set), by the same xgrammar that TensorRT-LLM then compiles it with. What
follows reasoning becomes a grammar that begins with free text. Both are xgrammar's dialect: llguidance gets schemas as
they are, and no `reasoning_end`.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from bireme.errors import RequestError
from bireme.guides import KINDS, REASONING_END, TRIGGER
from bireme.logits.guided.compile_process import explain, rewrite, rewrite_tag

logger = logging.getLogger("bireme.engines")
_LAID_OUT = ("json", "json_object")
_BLANKS = r"root ::= [ \t\r\n]{0,4}"
_ANY_OBJECT = '{"type": "object"}'
# xgrammar's characters of a string of limited length: it lets control characters in, which JSON text must not hold.
_LIMITED, _WITHOUT_CONTROL = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"


class TrtllmGuides:
    """Of one engine; its backend and layout never change."""

    def __init__(self, backend: str | None, any_whitespace: bool) -> None:
        self._backend = backend
        self._any_whitespace = any_whitespace
        self._xgrammar: Any = _load_grammar() if backend == "xgrammar" else None
        self._lays_out = self._xgrammar is not None and not any_whitespace

    def fields(self, guide: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RequestError."""
        if self._backend is None:
            raise RequestError("guided_decoding: guided_decoding_backend is not set on this worker; set it to xgrammar")
        if TRIGGER in guide:
            raise RequestError(
                f"guided_decoding.{TRIGGER}: TensorRT-LLM guides from the first token; use engine: torch, or a"
                " structural_tag of type triggered_tags"
            )
        kind = next(name for name in guide if name in KINDS)
        given = self._rewritten(kind, guide[kind])
        if end := guide.get(REASONING_END):
            return {"grammar": self._after_reasoning(end, kind, given)}
        if kind == "choice":
            return {"regex": choice_regex(given)}
        if self._lays_out and kind in _LAID_OUT and (grammar := self._readable(kind, self._parse(kind, given))):
            return {"grammar": grammar}
        return {kind: given}

    def _rewritten(self, kind: str, given: Any) -> Any:
        if kind != "structural_tag" and (kind != "json" or self._backend != "xgrammar"):
            return given
        try:
            tree = json.loads(given) if isinstance(given, str) else copy.deepcopy(given)
            made = rewrite(tree) if kind == "json" else rewrite_tag(tree, any_whitespace=True)
        except ValueError as error:
            raise RequestError(f"guided_decoding.{kind}: {error}") from error
        return json.dumps(made, ensure_ascii=False) if isinstance(given, str) else made

    def _after_reasoning(self, end: str, kind: str, given: Any) -> str:
        """Behind everything up to and including `end`, and a little white space."""
        grammar = None
        if self._xgrammar is not None and kind != "structural_tag":
            before = [self._xgrammar.from_ebnf(part) for part in (prose_until(end), _BLANKS)]
            grammar = self._readable(kind, self._xgrammar.concat(*before, self._parse(kind, given)))
        if grammar is None:
            raise RequestError(
                f"guided_decoding.{REASONING_END}: {end!r}; TensorRT-LLM guides from the first token, and only"
                " xgrammar's grammars can be set behind it; use a structural_tag that has it as a part"
            )
        return grammar

    def _parse(self, kind: str, given: Any) -> Any:
        try:
            if kind in _LAID_OUT:
                return self._parse_json(_ANY_OBJECT if kind == "json_object" else given)
            if kind == "grammar":
                return self._xgrammar.from_ebnf(given)
            return self._xgrammar.from_regex(choice_regex(given) if kind == "choice" else given)
        except Exception as error:  # a guide's mistake; xgrammar says it in several types
            raise RequestError(f"guided_decoding.{kind}: {explain(error)}") from error

    def _parse_json(self, given: Any) -> Any:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return self._xgrammar.from_json_schema(text, any_whitespace=self._any_whitespace, strict_mode=True)

    def _readable(self, kind: str, grammar: Any) -> str | None:
        """None: this release of xgrammar does not read what it writes."""
        text = str(grammar)
        if kind in _LAID_OUT:
            text = text.replace(_LIMITED, _WITHOUT_CONTROL)
        try:
            self._xgrammar.from_ebnf(text)
        except Exception as error:
            logger.warning("guide_unreadable error=%s", explain(error))
            return None
        return text


def prose_until(end: str) -> str:
    """Return EBNF of text up to its first `end`; rule `seen_N`: N characters of it stand there."""
    ahead: list[dict[str, int]] = []  # after N characters: the next one -> how many stand there then, unless 0
    back = 0  # where a text with N characters of `end` would be without its first one
    for count, character in enumerate(end):
        ahead.append({**(ahead[back] if count else {}), character: count + 1})
        back = ahead[back].get(character, 0) if count else 0
    return "\n".join(["root ::= seen_0", *(_rule(count, ways, len(end)) for count, ways in enumerate(ahead))])


def _rule(count: int, ahead: Mapping[str, int], size: int) -> str:
    ways = [f"[{_code(one)}]" + (f" seen_{at}" if at < size else "") for one, at in ahead.items()]
    return f"seen_{count} ::= {' | '.join(ways)} | [^{''.join(map(_code, ahead))}] seen_0"


def _code(character: str) -> str:
    return f"\\U{ord(character):08x}"


def choice_regex(choices: Sequence[str]) -> str:
    return "(" + "|".join("".join(_escaped(character) for character in choice) for choice in choices) + ")"


def _escaped(character: str) -> str:
    # re.escape writes `\ ` and `\-`, which grammar compilers refuse.
    return f"\\{character}" if character in r".^$*+?{}[]\|()/" else character


def _load_grammar() -> Any:
    try:
        from xgrammar import Grammar
    except ImportError as error:
        logger.warning("guide_grammars_off error=%s", error)
        return None
    return Grammar
