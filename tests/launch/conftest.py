"""Fixtures of the launch tests."""

import pytest

from bireme.config import Recipe, WorkerEntry


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("recipe")
    return Recipe(model=str(folder), workers={"decode": WorkerEntry(engine="mocker")}, name="test", folder=str(folder))
