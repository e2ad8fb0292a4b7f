"""tools/screenshots.py, run as its user would."""

import subprocess
import sys

from bireme.config import CHECKOUT
from tests.services.playground_servers import URL


def test_a_picture_of_the_playground_is_made(deployment, tmp_path):
    command = [sys.executable, "tools/screenshots.py", "light", "--url", URL, "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "playground-light.png").read_bytes().startswith(b"\x89PNG")
