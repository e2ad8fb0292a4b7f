"""The messages of bireme/workers/kserve.py against those that tritonclient has from the protocol's own file."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from bireme.workers import kserve
from bireme.workers.grpc import infer_request, outputs_of

NAMES = (
    "ModelReadyRequest",
    "ModelReadyResponse",
    "ModelInferRequest",
    "ModelInferResponse",
    "ModelStreamInferResponse",
)


def fields_of(descriptor, wanted):
    """Return name -> (number, type, whether there are many, fields of its message) of the fields that are wanted."""
    found = {}
    for name, (_, _, _, inner) in wanted.items():
        field = descriptor.fields_by_name[name]
        message = fields_of(field.message_type, inner) if field.message_type else {}
        found[name] = (field.number, field.type, field.is_repeated, message)
    return found


def all_fields(descriptor):
    found = {}
    for field in descriptor.fields:
        message = all_fields(field.message_type) if field.message_type else {}
        found[field.name] = (field.number, field.type, field.is_repeated, message)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_field_has_the_protocol_s_name_number_and_type(name):
    described = all_fields(getattr(kserve, name).DESCRIPTOR)
    assert described and fields_of(getattr(service_pb2, name).DESCRIPTOR, described) == described


def test_an_answer_with_fields_that_are_not_described_is_read():
    response = service_pb2.ModelInferResponse(model_name="decode", model_version="1", id="7")
    response.parameters["triton_final_response"].bool_param = True
    response.outputs.add(name="output_ids", datatype="INT32", shape=[2])
    response.raw_output_contents.append(np.array([4, 5], np.int32).tobytes())
    sent = service_pb2.ModelStreamInferResponse(infer_response=response).SerializeToString()
    read = kserve.ModelStreamInferResponse.FromString(sent)
    assert not read.error_message and outputs_of(read.infer_response)["output_ids"].tolist() == [4, 5]


def test_an_error_is_read():
    sent = service_pb2.ModelStreamInferResponse(error_message="NOT_FOUND: no such life").SerializeToString()
    assert kserve.ModelStreamInferResponse.FromString(sent).error_message == "NOT_FOUND: no such life"


def test_the_bytes_of_a_request_are_those_of_the_generated_message():
    tensors = {"ids": np.zeros((2, 300), np.int32), "text": b"a"}
    request = service_pb2.ModelInferRequest(model_name="prefill")
    request.inputs.add(name="ids", datatype="INT32", shape=[2, 300])
    request.inputs.add(name="text", datatype="BYTES", shape=[1])
    request.raw_input_contents.extend([tensors["ids"].tobytes(), b"\1\0\0\0a"])
    assert infer_request("prefill", tensors) == request.SerializeToString()
