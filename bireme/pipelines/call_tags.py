"""Structural tags: in an answer that may hold calls, the token that begins one makes it a call of an offered function.

What follows the token is held to the format and the function's schema, so it is a call by construction; text that
spells the mark is text. Schemas are loosened unless their function is strict; where no guide can be made of the others
either, the answer stays free. docs/parsers.md says which formats have one.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import msgspec

from bireme.config import Recipe
from bireme.errors import ConfigError, RequestError
from bireme.guides import TRIGGER, parse_guide
from bireme.pipelines.chat_request import ChatRequest
from bireme.text.parsers.base import Guide, ToolFormat
from bireme.text.tokenizer import TextTokenizer

logger = logging.getLogger("bireme.pipelines")
_NUM_KEPT = 64  # sets of tools whose guides are kept


class CallTags:
    def __init__(self, recipe: Recipe, tools: ToolFormat | None, tokenizer: TextTokenizer) -> None:
        """Raises ConfigError where the recipe wants what can't be."""
        self._limits, self._tools = recipe.limits, tools
        self._token: int | None = None  # None: calls are not held to anything
        self._made = functools.lru_cache(_NUM_KEPT)(self._make)
        if tools is None or recipe.chat.structural_tags is False:
            return
        if not (obstacle := _obstacle(recipe, tools, tokenizer)):
            self._token = tokenizer.mark_id(tools.trigger)
        elif recipe.chat.structural_tags:
            raise ConfigError(f"chat.structural_tags: true, but {obstacle}; set false, or leave it out")
        logger.info("structural_tags token=%s reason=%r", self._token, obstacle)

    def guide(self, request: ChatRequest) -> Guide | None:
        """Return the guide of a request whose answer need not have calls. Raises RequestError for strict functions."""
        if self._token is None or request.sampling.params.ignore_eos:
            return None
        functions = msgspec.json.encode(request.functions)
        make = self._made if len(functions) <= self._limits.max_guide_bytes else self._make  # these would fill memory
        return make(functions, request.is_parallel)

    def _make(self, functions: bytes, is_parallel: bool) -> Guide | None:
        assert self._tools is not None
        offered: list[dict[str, Any]] = msgspec.json.decode(functions)
        is_loose = not any(function.get("strict") for function in offered)
        guide = self._tools.guide(offered, is_parallel)
        try:
            text = parse_guide(guide, self._limits, "tools").text
        except RequestError as error:
            if not is_loose:
                raise
            logger.warning("guide_left_out reason=%r", str(error))
            return None
        return {
            "structural_tag": text,
            TRIGGER: {"token": self._token, "stop_after_first": not is_parallel, "is_loose": is_loose},
        }


def _obstacle(recipe: Recipe, tools: ToolFormat, tokenizer: TextTokenizer) -> str:
    """Return why calls can't be held to their schemas; "": they can."""
    for stage in ("prefill", "decode"):
        if (entry := recipe.workers.get(stage)) is None:
            continue
        if not entry.kind.follows_triggers:
            return f"engine {entry.engine} follows no guide that a token begins"
        if entry.engine_config.guided_decoding_backend is None:
            return f"guided_decoding_backend of {stage} is null"
    if not tools.trigger:
        return f"format {recipe.chat.tool_parser} has no mark that begins a guide"
    if tokenizer.mark_id(tools.trigger) is None:
        return f"{tools.trigger} is not one token"
    return ""
