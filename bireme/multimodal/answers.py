"""What an encoder has made: as it leaves the engine process, handles signed, and as the caller receives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bireme.messages import Finish, Logprobs
from bireme.multimodal.wire import EncodeAnswer, Encoded, encode_answer, seal_handle

if TYPE_CHECKING:
    from bireme.multimodal.encoding import EncodedPicture, EncodeOutcome


def seal_outcome(outcome: EncodeOutcome, key: bytes) -> bytes:
    pictures = tuple(_sealed(picture, outcome.hidden_size, key) for picture in outcome.pictures)
    return encode_answer(EncodeAnswer(pictures=pictures, embeddings=outcome.embeddings))


def _sealed(picture: EncodedPicture, hidden_size: int, key: bytes) -> Encoded:
    encoded = picture.encoded
    return Encoded(
        hash=encoded.name,
        num_tokens=encoded.rows.num_tokens,
        hidden_size=hidden_size,
        grid=encoded.grid,
        handles=tuple(seal_handle(handle, key) for handle in picture.handles),
    )


class EncodeSink:
    """Sink of one encode: no tokens come, only the end."""

    def __init__(self, finish: Callable[[Finish], None]) -> None:
        self._finish = finish

    def push(self, tokens: Sequence[int], logprobs: Logprobs = None, prompt_logprobs: Logprobs = None) -> None:
        return None

    def finish(self, finish: Finish) -> None:
        self._finish(finish)
