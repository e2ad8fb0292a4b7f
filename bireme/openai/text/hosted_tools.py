"""Tools that OpenAI's or Anthropic's servers run themselves: refused, or left out where the recipe says so."""

from __future__ import annotations

import functools
import logging

from bireme.config import Recipe

_KINDS = (
    "web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "image_generation", "mcp",
    "tool_search_tool",
)  # fmt: skip
_MAX_SHOWN = 40  # characters
logger = logging.getLogger("bireme.openai")


def is_left_out(kind: object, recipe: Recipe) -> bool:
    """Whether a request goes on without its tool of this type; the log says so, once for each type."""
    if not recipe.chat.drop_hosted_tools or not isinstance(kind, str) or not kind.startswith(_KINDS):
        return False
    _tell(recipe.name, kind[:_MAX_SHOWN])
    return True


@functools.lru_cache(maxsize=64)
def _tell(recipe: str, kind: str) -> None:
    logger.warning("hosted_tool_left_out recipe=%s type=%s", recipe, kind)
