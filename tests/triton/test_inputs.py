"""Requests of Triton's shape -> Inputs."""

from __future__ import annotations

import numpy as np
import pytest

from bireme.errors import RequestError
from bireme.triton.inputs import read_request


class Tensor:
    def __init__(self, name, array):
        self._name, self.array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        if self.array is None:
            raise RuntimeError("Tensor is stored in GPU")
        return self.array


class Request:
    def __init__(self, *tensors, parameters="", timeout=0, outputs=()):
        self._values = (tensors, parameters, timeout, outputs)

    def inputs(self):
        return self._values[0]

    def parameters(self):
        return self._values[1]

    def timeout(self):
        return self._values[2]

    def requested_output_names(self):
        return self._values[3]

    def request_id(self):
        return "r1"


OUTPUTS = frozenset({"a", "b"})


def test_tensors_are_copies():
    source = np.array([1, 2], np.int32)
    inputs = read_request(Request(Tensor("x", source)), OUTPUTS)
    source[0] = 9  # Triton reuses the memory
    assert inputs["x"].tolist() == [1, 2]


def test_the_timeout_is_rounded_up_to_milliseconds():
    assert read_request(Request(timeout=1), OUTPUTS).info.timeout_ms == 1
    assert read_request(Request(timeout=0), OUTPUTS).info.timeout_ms == 0


def test_all_outputs_requested_is_the_same_as_none_named():
    assert read_request(Request(outputs=("a", "b")), OUTPUTS).info.outputs == frozenset()
    assert read_request(Request(outputs=("a",)), OUTPUTS).info.outputs == {"a"}


def test_parameters_are_read():
    assert read_request(Request(parameters='{"top_p": 0.5}'), OUTPUTS).info.parameters == {"top_p": 0.5}


def test_a_tensor_out_of_reach_is_named():
    with pytest.raises(RequestError, match="x: the tensor can't be read"):
        read_request(Request(Tensor("x", None)), OUTPUTS)
