"""The masks of a step's rows, filled on several threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bireme.errors import BiremeError
from bireme.logits.guided.guidance import Bitmask, Guidance

# A matcher leaves the interpreter to others while it works.
_MAX_THREADS = 4  # beyond, they wait for the interpreter more than they work
_ROWS_A_THREAD = 4  # for fewer none is woken: a row takes a tenth of a millisecond


class MaskFiller:
    def __init__(self, num_threads: int = 1) -> None:
        self._num_helpers = min(num_threads, _MAX_THREADS) - 1
        self._helpers: ThreadPoolExecutor | None = None  # its threads end with it

    def fill(self, guides: Sequence[Guidance], bitmask: Bitmask) -> dict[int, BiremeError]:
        """Return why a row has nothing, by its place."""
        filled = _Filled(guides, bitmask)
        num_helpers = min(self._num_helpers, len(guides) // _ROWS_A_THREAD - 1)
        if num_helpers <= 0:
            filled.work()
            return filled.errors
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self._num_helpers, thread_name_prefix="guide-masks")
        helping = [self._helpers.submit(filled.work) for _ in range(num_helpers)]
        filled.work()
        for one in helping:
            if not one.cancel():  # one that has not begun has nothing left to do
                one.result()
        return filled.errors


class _Filled:
    def __init__(self, guides: Sequence[Guidance], bitmask: Bitmask) -> None:
        self._bitmask = bitmask
        self._left = iter(list(enumerate(guides)))  # each thread takes the next one
        self.errors: dict[int, BiremeError] = {}

    def work(self) -> None:
        for at, guidance in self._left:
            try:
                guidance.fill(self._bitmask, at)
                continue
            except BiremeError as error:
                self.errors[at] = error
            except Exception as error:  # of its matcher: only this request ends
                self.errors[at] = BiremeError(f"guided_decoding: {type(error).__name__}: {error}")
            self._bitmask[at] = 0
