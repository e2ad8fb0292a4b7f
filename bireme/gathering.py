"""Coroutines side by side: all of their results, or the first failure, or their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from bireme.errors import drop_frames

_T = TypeVar("_T")


async def all_results(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results in order. The first failure cancels the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException as first:
        for task in tasks:
            task.cancel()
        for other in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(other, BaseException) and other is not first:
                drop_frames(other)
        raise


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and return when they have ended, whatever with."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
