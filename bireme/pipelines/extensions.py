"""The `bireme` object of OpenAI requests: what this server can do beyond OpenAI's fields."""

from __future__ import annotations

from typing import Any

import msgspec

from bireme.pipelines.json_body import check_plain

_SAMPLING = (
    "ignore_eos", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "priority",
    "logits_processors", "guided_decoding", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip


class Extensions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unset stays unset: the recipe's default, else the engine's."""

    ignore_eos: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: float | None = None  # 0 to 1, higher is served first
    logits_processors: list[dict[str, Any]] | None = None  # [{"name": ..., "args": {...}}]
    guided_decoding: dict[str, Any] | None = None  # exactly one of json, regex, grammar, choice, structural_tag, ...
    cache_salt: str = ""  # prompts with different salts share no KV blocks
    chat_template_kwargs: dict[str, Any] = {}
    return_timing: bool = False  # times and workers in the answer's own `bireme` object

    def sampling(self) -> dict[str, Any]:
        """Return the sampling fields that are set. Raises RequestError for values that could not travel on."""
        fields = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        for name in ("logits_processors", "guided_decoding"):
            if name in fields:
                check_plain(fields[name], f"bireme.{name}")
        return fields


EXTENSION_NAMES = tuple(field.encode_name for field in msgspec.structs.fields(Extensions))
MISPLACED = {name: f"not a field of OpenAI's; send it as bireme.{name}" for name in EXTENSION_NAMES}
