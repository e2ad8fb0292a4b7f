"""CUDA graphs of steps by their rows, in one memory: which there are, which are still to be made, which stands in."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from bireme.engines.child.lost_device import raise_if_lost
from bireme.engines.torch.forward import graphs
from bireme.engines.torch.kernels.launch import MOST_OF_FORMS

logger = logging.getLogger("bireme.engines.torch")

MOST_MISSES = 32  # steps that lacked a graph, until it is made beside running requests
MOST_STOOD_IN = 256  # of such for which a larger one stood in
_MOST_ERROR = 0.02  # of the first's result against the same kernels launched singly, relative
_MOST_ERROR_OF_SIZES = 0.5  # of another's, whose kernels round otherwise, against that; of what is wrong 1 and more


class SizedStep(Protocol):
    def tell_nothing(self, size: int) -> None:
        """Have the next computation be one of rows that nobody has."""

    def compute(self, size: int, num_layers: int | None = None) -> Tensor:
        """Return the logits, in the same tensor each time. `num_layers`: of the first ones alone; None: of all."""


class SizedGraphs:
    """Used by the engine's thread."""

    def __init__(
        self, step: SizedStep, sizes: Sequence[int], num_kinds: int, made: str, off: str, apart: int = 2
    ) -> None:
        """`num_kinds`: of the layers, the first in which are all kinds; `made` and `off` begin lines of the log.

        `apart`: how many times as large as one that the first requests need the next of them is.
        """
        self.made: dict[int, torch.cuda.CUDAGraph] = {}
        self.error = ""  # why the last one that can't be made could not
        self._step, self._num_kinds, self._made_line, self._off_line = step, num_kinds, made, off
        self._forms, self._first, self._others = by_need(sizes, apart)  # compiled with them; still to be made
        self._misses: dict[int, int] = {}
        self._usual: Tensor | None = None  # logits of a row that nobody has, float32
        self._unjudged: dict[int, Tensor] = {}  # size -> how far it is off, which the GPU is finding out

    @property
    def to_make(self) -> list[int]:
        return [*self._first, *self._others]

    def compile_forms(self) -> None:
        """Compute a step of each form of the kernels, by which those are compiled that are not."""
        forms, self._forms = self._forms, []
        for size in forms:
            try:
                with torch.inference_mode():
                    self._step.tell_nothing(size)
                    self._step.compute(size, num_layers=self._num_kinds)
            except Exception as error:
                raise_if_lost(error, f"a step of {size} rows")
                self._failed(size, str(error).partition("\n")[0])

    def make_first(self) -> bool:
        """Make one of those that first requests need; False: there is none. `judge` has to follow."""
        if not self._first:
            return False
        self.make(self._first[0])
        return True

    def make_next(self) -> bool:
        """Make the next one of all, of an engine that is idle; False: there is none."""
        if not (to_make := self.to_make):
            return False
        self.make(to_make[0])
        self.judge()
        return True

    def make(self, size: int) -> None:
        """Make this one if it is still to be made; where that fails its steps go without. `judge` has to follow."""
        for sizes in (self._first, self._others):
            if size in sizes:
                sizes.remove(size)
                self._make(size)

    def judge(self) -> None:
        """Let go of those that compute something else."""
        for size, error in self._unjudged.items():
            if not float(error) <= _MOST_ERROR_OF_SIZES:
                del self.made[size]
                self._failed(size, f"the graph is {float(error):.3g} off")
        self._unjudged.clear()

    def size_for(self, size: int, most: int) -> int:
        """Return the smallest that is made, from this one on up to `most`; 0: there is none.

        One that many steps have lacked is made here, and running requests wait for it.
        """
        if size in self.made:
            return size
        found = self._larger(size, most)
        self._misses[size] = misses = self._misses.get(size, 0) + 1
        if misses % (MOST_STOOD_IN if found else MOST_MISSES) or size not in self.to_make:
            return found
        self.make(size)
        self.judge()
        return self._larger(size, most)

    def _larger(self, size: int, most: int) -> int:
        return min((one for one in self.made if size <= one <= most), default=0)

    def _make(self, size: int) -> None:
        began, other = time.monotonic(), next(iter(self.made.values()), None)
        try:
            with torch.inference_mode():
                self._step.tell_nothing(size)
                self.made[size] = self._record(size, None if other is None else other.pool())
        except Exception as error:
            raise_if_lost(error, f"the graph of a step of {size} rows")
            self._failed(size, str(error).partition("\n")[0])
        else:
            logger.info("%s=%d s=%.3f", self._made_line, size, time.monotonic() - began)

    def _record(self, size: int, pool: graphs.Pool | None) -> torch.cuda.CUDAGraph:
        compute = partial(self._step.compute, size)
        if self._usual is None:
            graph, result = graphs.record(compute, pool, compute)
            expected = result.to(torch.float32, copy=True)
            error = float(graphs.error_of(graph, result, expected))
            if not error <= _MOST_ERROR:
                raise RuntimeError(f"the graph is {error:.3g} off")
            self._usual = expected[:1].clone()
        else:
            graph, result = graphs.record(compute, pool, partial(compute, num_layers=self._num_kinds))
            self._unjudged[size] = graphs.error_of(graph, result, self._usual.expand_as(result))
        return graph

    def _failed(self, size: int, reason: str) -> None:
        self.error = reason
        logger.warning("%s=%d reason=%s", self._off_line, size, reason)


def by_need(sizes: Sequence[int], apart: int) -> tuple[list[int], list[int], list[int]]:
    """Return a size of each form of the kernels, those whose graphs the first requests need, and the rest.

    The latter as they are made: first the largest, into whose memory the others fit, then from the smallest on the next
    that is so many times as large or more. Until the rest is made each stands in for those below it.
    """
    forms, first, reached = [], list(sizes[-1:]), 0
    for least, most in zip((0, *MOST_OF_FORMS), MOST_OF_FORMS, strict=False):
        forms += [max(own)] if (own := [size for size in sizes if least < size <= most]) else []
    for size in sizes[:-1]:
        if size >= apart * reached:
            first.append(size)
            reached = size
    return forms, first, [size for size in reversed(sizes) if size not in first]
