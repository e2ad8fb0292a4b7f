"""Texts for an embedding model as token ids: with the model's prompts, checked one by one, on a thread if long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bireme.config import Recipe
from bireme.errors import RequestError
from bireme.metrics import Registry
from bireme.request import Ids, check_ids, check_text_tokens
from bireme.text.embedding_files import EmbeddingTexts, read_texts
from bireme.text.prompt_encoder import PromptEncoder
from bireme.text.tokenizer import TextTokenizer

NameOf = Callable[[int], str]  # of a text by its place, for errors


class EmbeddingEncoder:
    """Encodes with one tokenizer; used on one loop."""

    def __init__(self, tokenizer: TextTokenizer, recipe: Recipe, metrics: Registry) -> None:
        """Raises ConfigError for files of the model that can't be read."""
        self.texts: EmbeddingTexts = read_texts(recipe.model_path)
        self._tokenizer, self._limits = tokenizer, recipe.limits
        self._encoder = PromptEncoder(tokenizer, recipe.limits, 0, metrics)

    async def encode(
        self, texts: Sequence[str | Ids], prompt_name: str | None, max_seq_len: int | None, name_of: NameOf
    ) -> list[Ids]:
        """Return each text's ids; those that are ids already are checked. `max_seq_len`: None: not known yet.

        Raises RequestError, and ResourceExhaustedError when too much waits already.
        """
        if len(texts) > self._limits.max_embedding_inputs:
            raise RequestError(
                f"input: {len(texts)} texts; limits.max_embedding_inputs is {self._limits.max_embedding_inputs},"
                " send fewer"
            )
        whole = [self._whole(text, prompt_name, max_seq_len, name_of(at)) for at, text in enumerate(texts)]
        size = sum(map(len, whole))

        def encode() -> list[Ids]:
            return [self._ids(text, max_seq_len, name_of(at)) for at, text in enumerate(whole)]

        return await self._encoder.run(encode, size)

    def close(self) -> None:
        self._encoder.close()

    def _whole(self, text: str | Ids, prompt_name: str | None, max_seq_len: int | None, name: str) -> str | Ids:
        if not isinstance(text, str):
            if prompt_name:
                raise RequestError(f"prompt_name: not together with token ids ({name}), put its tokens before them")
            return check_ids(name, text, self._tokenizer.vocab_size)
        if not text:
            raise RequestError(f"{name}: empty; send at least one character")
        self._encoder.check(name, text, max_seq_len and max_seq_len + 1)
        return self.texts.whole(text, prompt_name)

    def _ids(self, text: str | Ids, max_seq_len: int | None, name: str) -> Ids:
        ids = np.array(self._tokenizer.encode(text), np.int32) if isinstance(text, str) else text
        check_text_tokens(name, len(ids), self._limits, max_seq_len)
        return ids
