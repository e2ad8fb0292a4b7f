"""Sides of a transfer that are closed, and children that are reaped, after each test; no file may stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bireme.kv.transfer.shm_file import sweep
from tests.kv.transfer.kv_side import Child, Side, all_files_of


@pytest.fixture
def backend() -> str:
    """What moves the rows; a test that is parametrized with `backend` runs with each."""
    return "shm"


@pytest.fixture
def make_side(tmp_path: Path, backend: str) -> Iterator[Callable[..., Side]]:
    sides: list[Side] = []

    def make(worker: str, **options: Any) -> Side:
        sides.append(Side(tmp_path, worker, backend=backend, **options))
        return sides[-1]

    yield make
    for side in sides:
        assert not side.room_in_use()
        side.close()
        assert not all_files_of(tmp_path, side.worker)


@pytest.fixture
def make_child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def make(worker: str, **options: Any) -> Child:
        children.append(Child(tmp_path, worker, **options))
        return children[-1]

    yield make
    for child in children:
        child.reap()
        sweep(tmp_path, child.worker)  # as its supervisor would


@pytest.fixture
def prefill(make_side: Callable[..., Side]) -> Side:
    return make_side("prefill")


@pytest.fixture
def decode(make_side: Callable[..., Side]) -> Side:
    return make_side("decode")
