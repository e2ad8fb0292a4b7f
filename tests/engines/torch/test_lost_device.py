"""A process whose GPU is lost for good ends itself, or does not start; a pass that failed otherwise ends nothing."""

import subprocess
import sys

import pytest
import torch

from bireme.config import CHECKOUT
from bireme.engines.child.lost_device import raise_if_lost
from bireme.engines.torch.forward.packed_decoder import PackedDecoder
from bireme.errors import UnavailableError
from tests.engines.torch import tiny_models
from tests.engines.torch.torch_harness import Harness

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


ASSERTED = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError(ASSERTED), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), False),
        (torch.OutOfMemoryError("CUDA out of memory."), False),
        (ValueError("misaligned address"), False),
    ],
)
def test_errors_that_leave_a_gpu_dead_are_told_from_those_that_can_be_lived_with(error, is_lost):
    if not is_lost:
        raise_if_lost(error, "a step")
        return
    with pytest.raises(UnavailableError, match=r"^the GPU was lost in a step: .*report that$") as found:
        raise_if_lost(error, "a step")
    assert found.value.__cause__ is error
    with pytest.raises(UnavailableError, match="lost in a step"):  # of a pass within another one
        raise_if_lost(found.value, "the first passes")


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines here have another decoder")
def test_an_engine_whose_decoder_loses_the_gpu_does_not_start_without_it(tmp_path, monkeypatch, caplog):
    def lose(self, batch):
        raise torch.AcceleratorError(ASSERTED)

    monkeypatch.setattr(PackedDecoder, "compute", lose)
    with pytest.raises(UnavailableError, match="the first passes of the packed decoder: CUDA error: device-side"):
        Harness(tiny_models.save(tmp_path, "llama"))
    assert "fused_off" not in caplog.text and "device_lost in=the first passes" in caplog.text
