"""Text to token ids: by fastokens where it reads the model's tokenizer, else by the tokenizers library.

fastokens is 7 to 70 times faster and reads only byte-level BPE and SentencePiece's BPE. It is used when both agree on
PROBES and on the model's own added tokens; should they differ elsewhere, `tokenizer_backend: tokenizers` turns it off.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import tokenizers

from bireme.errors import ConfigError

Backend = Literal["auto", "tokenizers", "fastokens"]
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "don't I'LL we've SHE'D it's CamelCase snake_case kebab-case ALLCAPS l33t",
    "1 12 123 1234 12345 3.14 -7 1e-9",
    "  two  spaces   three\t\ttabs\n\n\nlines \r\n ends  ",
    " ", "\n", "\u00a0\u2003\u3000", "x" * 300, " " * 130,
    "naïve café Ångström ﬁ ﬂ ½ ② ſ İ ı ß ẞ e\u0301 A\u030a \u1112\u1161\u11ab",
    "Ελληνικά Кириллица עברית العربية हिन्दी ไทย 東京都 中文字符 日本語のテキスト 한국어",
    "🙂👩\u200d👩\u200d👧🏽🇺🇳 \u200b\ufeff\u2028\x00\x07\x7f \U00010348\U0001d54f",
    'def f(x: int) -> str:\n    return f"{x!r}"  # ok', '{"a": [1, 2.5, null], "b": "\\u00e9"}',
    "<|a|> </s> [INST] <x> <<SYS>> ▁ Ġ ## ▁the Ċ", "https://example.org/a?b=c&d=%20#e user@example.org",
)  # fmt: skip
_MAX_ADDED = 200  # added tokens that are compared
logger = logging.getLogger("bireme.text")


class Encoder(Protocol):
    """Thread-safe; releases the GIL."""

    name: str

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises UnicodeEncodeError or TypeError for text that is not valid Unicode."""


class ReferenceEncoder:
    """The tokenizers library."""

    name = "tokenizers"

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._encode = inner.encode_batch_fast

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: only batches have the fast mode that leaves out the tokens' places in the text.
        ids: list[int] = self._encode([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


class FastEncoder:
    """fastokens; what it fails on goes to the reference."""

    name = "fastokens"

    def __init__(self, fast: Any, reference: ReferenceEncoder) -> None:
        self._encode, self._reference = fast.encode, reference

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self._encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        except (UnicodeEncodeError, TypeError):
            raise
        except Exception:  # a limit of its regular expressions
            return self._reference.encode(text, add_special_tokens)


def create_encoder(inner: tokenizers.Tokenizer, file: Path, backend: Backend = "auto") -> Encoder:
    """Return the encoder of a tokenizer.json. Raises ConfigError when `fastokens` is required and not possible."""
    reference = ReferenceEncoder(inner)
    if backend == "tokenizers":
        return reference
    try:
        encoder = FastEncoder(_load(file), reference)
        _compare(encoder, reference, inner)
    except _UnfitError as error:
        if backend == "fastokens":
            raise ConfigError(f"tokenizer_backend: fastokens can't be used: {error}; set auto or tokenizers") from error
        logger.debug("encoder=tokenizers file=%s reason=%s", file, error)
        return reference
    return encoder


class _UnfitError(Exception):
    """fastokens is not there, or not for this tokenizer."""


def _load(file: Path) -> Any:
    try:
        fast = importlib.import_module("fastokens").Tokenizer.from_file(str(file))
        fast.no_truncation()
        fast.no_padding()
    except ImportError as error:
        raise _UnfitError("it is not installed (pip install fastokens)") from error
    except Exception as error:  # the library raises bare ones
        raise _UnfitError(str(error)) from error
    return fast


def _compare(encoder: FastEncoder, reference: ReferenceEncoder, inner: tokenizers.Tokenizer) -> None:
    for text in (*PROBES, *_added(inner)):
        for add_special_tokens in (True, False):
            if encoder.encode(text, add_special_tokens) != reference.encode(text, add_special_tokens):
                raise _UnfitError(f"it encodes {text[:40]!r} differently")


def _added(inner: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield texts with the model's own added tokens, whose matching has rules of its own."""
    tokens = [token.content for token in inner.get_added_tokens_decoder().values()]
    for token in tokens[:_MAX_ADDED]:
        yield f"{token} a {token}b{token}\n{token}"
    yield "".join(tokens[:_MAX_ADDED])
