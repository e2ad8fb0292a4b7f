"""Fixtures of the launch tests."""

import pytest

from bireme.config import Recipe, WorkerEntry
from bireme.launch.ports import is_free


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("recipe")
    return Recipe(model=str(folder), workers={"decode": WorkerEntry(engine="mocker")}, name="test", folder=str(folder))


@pytest.fixture
def ipv6() -> str:
    """The address of this machine itself."""
    try:
        is_free(0, "::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    return "::1"
