"""A model's tokenizer, from its folder, by the `tokenizers` library alone: no torch, no transformers.

Whether bos and eos are added says the post-processor of `tokenizer.json` alone, as in transformers 5.
`tokenizer_config.json` names the special tokens for templates. The chat template is chat_template.jinja,
chat_template.json or tokenizer_config.json's own, in this order. Plain text is encoded as in transformers, control
tokens in it included; in what callers send to a chat they are text (control_tokens.py).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from bireme.config import Recipe
from bireme.errors import ConfigError, RequestError
from bireme.text import vocabulary
from bireme.text.chat_template import ChatTemplate, Message
from bireme.text.control_tokens import ControlTokens, Prompt
from bireme.text.cuts import cut_pattern
from bireme.text.detokenizer import Detokenizer, TableDetokenizer, WindowDetokenizer
from bireme.text.encoder import Backend, Encoder, ReferenceEncoder, create_encoder
from bireme.text.token_lengths import longest_token_bytes
from bireme.text.tokenizer_files import FILES, TOKENIZER, read_texts

_END_PROBES = ("a b c", "The quick brown fox", "x = 12")


class TextTokenizer:
    """Text to token ids and back, for many threads at once: encoding releases the GIL."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        max_prompt_bytes: int = 8 << 20,
        encoder: Encoder | None = None,
        trusted_roles: Sequence[str] = (),
        raw_control_tokens: bool = True,
    ) -> None:
        """`trusted_roles`: of messages whose control tokens count; `raw_control_tokens`: those of `raw_texts` do."""
        self._inner = inner
        self._raw_control_tokens = raw_control_tokens
        self._encoder = encoder or ReferenceEncoder(inner)
        self.special_tokens = dict(special_tokens or {})  # by role: bos_token, eos_token, ...
        templates = templates or {}
        self._controls = ControlTokens.of(inner, self.special_tokens.values(), templates.values())
        self._templates = {
            name: ChatTemplate(source, self.special_tokens, max_prompt_bytes, self._controls, trusted_roles)
            for name, source in templates.items()
        }
        added = inner.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """Ids in use; the model's head may be larger."""
        return int(self._inner.get_vocab_size())

    @functools.cached_property
    def cut_pattern(self) -> re.Pattern[str] | None:
        """Where `encode_plain` of a text is that of its parts (cuts.py); None: nowhere for certain."""
        return cut_pattern(self._inner)

    @functools.cached_property
    def ends(self) -> tuple[list[int], list[int]] | None:
        """The special tokens that `encode` puts before and after every text; None: they are not always the same."""
        found = [_around(self.encode_plain(text), self.encode(text)) for text in _END_PROBES]
        return found[0] if all(ends == found[0] for ends in found) else None

    @functools.cached_property
    def longest_token_bytes(self) -> int | None:
        """The most bytes of a text that one token can stand for; None: any number."""
        return longest_token_bytes(self._inner)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token given by its text, for example an end-of-sequence token."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    def mark_id(self, text: str) -> int | None:
        """Return the id of the token that this mark always is, because it was added to the vocabulary as a whole."""
        found = self._inner.token_to_id(text)
        return int(found) if found in self._added_ids else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises RequestError for text that is not valid Unicode."""
        try:
            return self._encoder.encode(text, add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # tokenizers says TypeError for lone surrogates
            raise RequestError("the prompt holds a lone surrogate; send valid Unicode") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return what a token contributes to the text, which may be a part of a character."""
        table = self._table
        if table is None:
            return self.decode([token], skip_special_tokens=False).encode()
        if not 0 <= token < len(table.texts):
            return b""
        text = table.texts[token]
        return table.parts[token] if text is None else text.encode()

    def is_special(self, token: int) -> bool:
        """Whether it is left out of texts that skip special tokens."""
        return token in self._special_ids

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a new incremental detokenizer for one sequence. The first call tabulates the vocabulary (0.4 s for
        150,000 tokens), so servers call it once before they are ready.
        """
        table = self._table_without_special if skip_special_tokens else self._table
        return TableDetokenizer(table) if table else WindowDetokenizer(self._inner, skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Return the prompt of a conversation. Raises RequestError when there is no template, or it refuses."""
        template = (self._templates.get("tool_use") if tools else None) or self._templates.get("default")
        if template is None:
            raise RequestError("messages: this model has no chat template; send text_input instead")
        return template.render(messages, tools, variables)

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text that is no prompt, such as a bad word: without special tokens around it."""
        return self.encode(text, add_special_tokens=False)

    def encode_chat(self, prompt: Prompt) -> list[int]:
        """Encode a rendered prompt: the template's control tokens are tokens, those of callers are text."""
        return [token for text in self.chat_texts(prompt) for token in self.encode_plain(text)]

    def raw_texts(self, text: str) -> Iterable[str]:
        """Return the texts that a prompt without a template is encoded in, each by `encode_plain`."""
        return [text] if self._raw_control_tokens else self.chat_texts(self._controls.pieces(text))

    def chat_texts(self, prompt: Prompt) -> Iterator[str]:
        """Yield the texts that a rendered prompt is encoded in, each by `encode_plain`."""
        for at, piece in enumerate(prompt.pieces):
            if at % 2 == 0:
                yield piece
            elif piece:
                yield from self._controls.fragments(piece)

    @functools.cached_property
    def _table(self) -> vocabulary.Vocabulary | None:
        return vocabulary.build(self._inner)

    @functools.cached_property
    def _table_without_special(self) -> vocabulary.Vocabulary | None:
        return self._table and self._table.without(self._special_ids)


def _around(plain: list[int], whole: list[int]) -> tuple[list[int], list[int]] | None:
    """Return what stands before and after `plain` in `whole`; None: it is not in there, or at several places."""
    places = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    return (whole[: places[0]], whole[places[0] + len(plain) :]) if len(places) == 1 else None


def load_tokenizer(
    path: str,
    max_prompt_bytes: int = 8 << 20,
    chat_template: str = "",
    backend: Backend = "auto",
    trusted_roles: Sequence[str] = (),
    raw_control_tokens: bool = True,
) -> TextTokenizer:
    """Load from a folder, or a hub id where huggingface_hub is installed. Raises ConfigError with the remedy.

    `chat_template`: a Jinja file in place of the model's own templates. `backend`: what encodes (encoder.py).
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else even one text goes to a thread of the library
    folder = Path(path) if Path(path).is_dir() else _download(path)
    special, templates = read_texts(folder, chat_template)
    inner = _inner(folder)
    encoder = create_encoder(inner, folder / TOKENIZER, backend)
    return TextTokenizer(inner, special, templates, max_prompt_bytes, encoder, trusted_roles, raw_control_tokens)


def recipe_tokenizer(recipe: Recipe) -> TextTokenizer:
    """Load what a recipe says. Raises ConfigError."""
    return load_tokenizer(
        recipe.tokenizer_path,
        recipe.limits.max_prompt_bytes,
        recipe.chat_template,
        recipe.tokenizer_backend,
        recipe.chat.trusted_roles,
        recipe.raw_control_tokens,
    )


def _download(path: str) -> Path:
    if path.startswith(("/", ".")) or path.count("/") != 1:
        raise ConfigError(f"tokenizer folder {path} does not exist; check `model` and `tokenizer` in recipe.yaml")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{path} is not a folder; to load it from a hub pip install huggingface_hub, or give a folder"
        ) from error
    try:
        return Path(snapshot_download(path, allow_patterns=list(FILES)))
    except Exception as error:  # network, authorization, missing repository: the hub's own text says which
        raise ConfigError(f"{path} can't be downloaded: {type(error).__name__}: {error}") from error


def _inner(folder: Path) -> tokenizers.Tokenizer:
    file = folder / TOKENIZER
    if not file.exists():
        raise ConfigError(
            f"{file} does not exist; save it with transformers:"
            f" AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file} can't be read: {error}; download it again") from error
    inner.no_truncation()  # left over from training in some checkpoints; would cut prompts silently
    inner.no_padding()
    return inner
