"""From a checked guide to GuidedDecodingParams' keyword arguments: exactly one field, or a refusal with its reason.

TensorRT-LLM compiles a JSON schema with any amount of white space between its parts, which a model can fill its
whole answer with. Here a schema becomes a grammar of one layout first, as in the embedded engine (unless
`guided_decoding_config.any_whitespace` is set), by the same xgrammar that TensorRT-LLM then compiles it with. Its
grammars are xgrammar's dialect: to llguidance, schemas go as they are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from bireme.errors import RequestError
from bireme.guides import KINDS, REASONING_END
from bireme.logits.guided.compile_process import explain
from bireme.logits.guided.schema import check_schema

logger = logging.getLogger("bireme.engines")
_ANY_OBJECT = '{"type": "object"}'
# xgrammar's characters of a string of limited length: it lets control characters in, which JSON text must not hold.
_LIMITED, _WITHOUT_CONTROL = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"


class Guides:
    """What one engine does with guides; its backend and layout never change."""

    def __init__(self, backend: str | None, any_whitespace: bool) -> None:
        self._backend = backend
        self._grammar = None if backend != "xgrammar" or any_whitespace else _load_grammar()

    def fields(self, guide: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RequestError."""
        if self._backend is None:
            raise RequestError("guided_decoding: guided_decoding_backend is not set on this worker; set it to xgrammar")
        if guide.get(REASONING_END):
            raise RequestError(
                f"guided_decoding.{REASONING_END}: TensorRT-LLM guides from the first token; use a structural_tag"
            )
        kind = next(name for name in guide if name in KINDS)
        if kind == "choice":
            return {"regex": choice_regex(guide["choice"])}
        if kind in ("json", "json_object") and (grammar := self._grammar_of(kind, guide[kind])) is not None:
            return {"grammar": grammar}
        return {kind: guide[kind]}

    def _grammar_of(self, kind: str, given: Any) -> str | None:
        """Return the grammar of one layout; None: TensorRT-LLM is to make its own."""
        if self._grammar is None:
            return None
        text = _ANY_OBJECT if kind == "json_object" else given
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        try:
            check_schema(json.loads(text))
            found = str(self._grammar.from_json_schema(text, any_whitespace=False, strict_mode=True))
        except Exception as error:  # a schema's mistake; xgrammar says it in several types
            raise RequestError(f"guided_decoding.{kind}: {explain(error)}") from error
        return self._readable(found.replace(_LIMITED, _WITHOUT_CONTROL))

    def _readable(self, grammar: str) -> str | None:
        """Return the grammar, if this release of xgrammar reads what it writes."""
        assert self._grammar is not None
        try:
            self._grammar.from_ebnf(grammar)
        except Exception as error:
            logger.warning("guide_layout_free error=%s", explain(error))
            return None
        return grammar


def choice_regex(choices: Sequence[str]) -> str:
    """Return a pattern that matches exactly one of the texts."""
    return "(" + "|".join("".join(_escaped(character) for character in choice) for choice in choices) + ")"


def _escaped(character: str) -> str:
    # re.escape writes `\ ` and `\-`, which grammar compilers refuse.
    return f"\\{character}" if character in r".^$*+?{}[]\|()/" else character


def _load_grammar() -> Any:
    try:
        from xgrammar import Grammar
    except ImportError as error:
        logger.warning("guide_layout_free error=%s", error)
        return None
    return Grammar
