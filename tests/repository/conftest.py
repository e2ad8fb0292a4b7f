"""Rules over the whole code share what they have parsed, and leave none of it behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.repository import house


@pytest.fixture(scope="package", autouse=True)
def parsed_once() -> Iterator[None]:
    """A million nodes and more would otherwise be looked through by each collection of garbage of later tests."""
    yield
    for parsed in (house.tree_of, house.nodes_of, house.functions_of, house.imports_of):
        parsed.cache_clear()
