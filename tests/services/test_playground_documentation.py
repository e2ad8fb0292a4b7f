"""The pictures of the playground in the documentation."""

from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["playground-light.png", "playground-dark.png"])
def test_a_screenshot_is_in_the_documentation_and_small(name):
    path = Path("docs") / name
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size < 300_000
    assert f"]({name})" in Path("docs/openai.md").read_text()
