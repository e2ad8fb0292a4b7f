"""The pictures of the playground in the documentation."""

from pathlib import Path

import pytest

SHOWN_IN = {
    "playground-light.png": "openai.md",
    "playground-dark.png": "openai.md",
    "playground-picture.png": "multimodal.md",
    "playground-video.png": "video.md",
}


@pytest.mark.parametrize("name", SHOWN_IN)
def test_a_screenshot_is_in_the_documentation_and_small(name):
    path = Path("docs") / name
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size < 150_000
    assert f"]({name})" in Path("docs", SHOWN_IN[name]).read_text()
