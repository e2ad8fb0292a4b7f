"""A process whose GPU is lost for good ends itself; one whose pass has failed for another reason does not."""

import subprocess
import sys

import pytest
import torch

from bireme.config import CHECKOUT

CODE = """
import time
import torch
from bireme.engines.child.lost_device import leave_if_lost
try:
    {action}
except RuntimeError:
    leave_if_lost("decode")
    time.sleep({seconds})
"""
OUT_OF_RANGE = "torch.zeros(4, device='cuda')[torch.tensor([99], device='cuda')].cpu()"  # a device-side assert


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("action", "seconds", "code"), [(OUT_OF_RANGE, 30, 70), ("torch.empty(1 << 50, device='cuda')", 1, 0)]
)
def test_a_process_ends_if_its_gpu_is_lost(action, seconds, code):
    command = [sys.executable, "-c", CODE.format(action=action, seconds=seconds)]
    assert subprocess.run(command, cwd=CHECKOUT, timeout=120, check=False).returncode == code
