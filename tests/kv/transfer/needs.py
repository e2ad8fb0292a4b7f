"""What some transfers need of the machine. Apart from kv_side.py, whose many child processes would import pytest."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bireme.kv.transfer.nixl import MODULES

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in MODULES), reason="nixl-cu12 is not installed"
)
needs_cuda = pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no GPU")
