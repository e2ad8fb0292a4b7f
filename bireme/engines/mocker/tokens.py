"""The tokens that the mocker makes: a function of the prompt and the position alone.

    token(prompt, i) = ids[splitmix64(digest(prompt) + (i + 1) * GOLDEN) mod len(ids)]

`digest` is XXH3-64 over the prompt's int32 little-endian ids, resumed tokens left out;
i counts generated tokens from 0, resumed ones included. So a client that knows the prompt can tell a lost,
repeated or reordered token, and a migrated stream goes on exactly. `ids` are the printable ids of the
model's tokenizer, or all from FIRST_ID to the vocabulary's end where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from bireme.errors import ConfigError

FIRST_ID = 300  # below are special tokens and single bytes
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Ids = npt.NDArray[np.int32]


def expected_tokens(prompt_ids: Sequence[int], n: int, ids: Ids | None = None, first: int = 0) -> list[int]:
    """`ids`: of `plain_ids` or `printable_ids`."""
    prompt = np.asarray(prompt_ids, "<i4").tobytes()
    return tokens_at(prompt_digest(prompt), first, n, plain_ids(32000) if ids is None else ids)


def prompt_digest(prompt: bytes) -> int:
    return xxhash.xxh3_64_intdigest(prompt)


def tokens_at(digest: int, first: int, n: int, ids: Ids) -> list[int]:
    x = np.arange(first + 1, first + n + 1, dtype=np.uint64) * GOLDEN + np.uint64(digest)  # wraps around on purpose
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    found: list[int] = ids[x % np.uint64(len(ids))].tolist()
    return found


def plain_ids(vocab_size: int) -> Ids:
    """From 0 in a vocabulary that is smaller."""
    return np.arange(FIRST_ID if vocab_size > FIRST_ID else 0, vocab_size, dtype=np.int32)


def printable_ids(folder: str) -> tuple[Ids, int]:
    """Those that decode to plain text, and the vocabulary's size. Raises ConfigError."""
    path = Path(folder) / "tokenizer.json"
    if not folder or not path.exists():
        raise ConfigError(
            "mocker: no tokenizer.json in the recipe's model folder; make the model, or set mocker.vocab_size"
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))
    special = {int(token) for token in tokenizer.get_added_tokens_decoder()}
    texts = tokenizer.decode_batch([[token] for token in range(vocab_size)], skip_special_tokens=False)
    ids = [token for token in range(FIRST_ID, vocab_size) if token not in special and _is_plain(texts[token])]
    return (np.array(ids, np.int32) if len(ids) >= 16 else plain_ids(vocab_size)), vocab_size


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and bool(text.strip())
