"""Log probabilities in OpenAI's form: tokens as text and as bytes."""

from __future__ import annotations

import functools
from typing import Any

from bireme.messages import TokenLogprob, TokenLogprobs
from bireme.text.tokenizer import TextTokenizer

LOWEST = -9999.0  # JSON has no infinity


class TokenTexts:
    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.is_special = tokenizer.is_special
        self.show = functools.lru_cache(maxsize=65536)(functools.partial(_shown, tokenizer))

    def text(self, token: int) -> str:
        text: str = self.show(token)["token"]
        return text

    def data(self, token: int) -> bytes:
        """Return the token's bytes, which may be a part of a character."""
        return bytes(self.show(token)["bytes"])

    def unique_text(self, token: int) -> str:
        """Return the text of /v1/completions: parts of characters, which would all look alike, show their bytes."""
        data = self.data(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat_entry(self, logprobs: TokenLogprobs, num_top: int) -> dict[str, Any]:
        """Return one token's entry; the chosen token comes first in `logprobs`, then the likeliest."""
        return {**self._entry(logprobs[0]), "top_logprobs": [self._entry(item) for item in logprobs[1 : 1 + num_top]]}

    def _entry(self, item: TokenLogprob) -> dict[str, Any]:
        return {**self.show(item[0]), "logprob": max(item[1], LOWEST)}


def _shown(tokenizer: TextTokenizer, token: int) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "bytes": list(data)}
