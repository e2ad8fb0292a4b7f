"""Marks of a step's parts: off unless asked for, and refused by name where they can't be."""

import logging

import pytest
import torch

from bireme.engines.torch.scheduling.step_ranges import step_range_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_marked_where_nobody_asks(value, caplog):
    mark = step_range_of(value, GPU)
    assert mark("plan") is mark("land") and not caplog.records


def test_on_a_gpu_the_marks_are_nvtx_ranges():
    assert step_range_of("1", GPU) is torch.cuda.nvtx.range


@pytest.mark.parametrize(("value", "device", "reason"), [("1", CPU, "runs on a CPU"), ("yes", GPU, "'yes': 1 or 0")])
def test_what_can_not_be_marked_is_said_and_the_engine_goes_on(value, device, reason, caplog):
    with caplog.at_level(logging.WARNING), step_range_of(value, device)("plan"):
        pass
    assert reason in caplog.text
