"""Prompts with pictures: each placeholder token becomes as many tokens as its picture has embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bireme.errors import RequestError

Ids = npt.NDArray[np.int32]


def expand(ids: Ids, placeholder: int, counts: Sequence[int]) -> tuple[Ids, list[int]]:
    """Return the expanded ids, and the position of each picture's first token in them.

    Raises RequestError unless the prompt has one placeholder a picture.
    """
    places = np.flatnonzero(ids == placeholder)
    if len(places) != len(counts):
        raise RequestError(
            f"messages: {len(counts)} images, but the model's chat template made places for {len(places)};"
            " this template does not show images there (put them into user messages)"
        )
    repeats = np.ones(len(ids), np.int64)
    repeats[places] = counts
    starts = np.cumsum(repeats) - repeats
    return np.repeat(ids, repeats).astype(np.int32), starts[places].tolist()
