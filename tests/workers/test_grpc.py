"""What grpc says of a call that failed, in our codes: who asked must know whether to try again; what is sent to it."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from grpc.aio import AioRpcError, Metadata
from tritonclient.grpc import service_pb2

from bireme.errors import NotFoundError
from bireme.workers.base import UnreachableError
from bireme.workers.grpc import infer_request, rpc_error


def told(code, details):
    return rpc_error(AioRpcError(code, Metadata(), Metadata(), details), "host:8001")


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
        (grpc.StatusCode.INTERNAL, "Internal error from Core"),  # the server ended while the subscription was written
    ],
)
def test_a_connection_that_breaks_is_unreachable(code, details):
    assert isinstance(told(code, details), UnreachableError)


@pytest.mark.parametrize(
    ("details", "remedy"),
    [
        ("last error: UNKNOWN: ipv4:10.0.0.1:8001: tcp handshaker shutdown", "set BIREME_GRPC"),
        ("last error: UNKNOWN: ipv4:10.0.0.1:8001: Ssl handshake failed: SSL_ERROR_SSL", "certificate"),
    ],
)
def test_only_who_fails_to_agree_on_tls_is_told_of_certificates(details, remedy):
    assert remedy in str(told(grpc.StatusCode.UNAVAILABLE, details))


def test_a_code_of_our_own_wins_over_grpc_s():
    assert isinstance(told(grpc.StatusCode.INTERNAL, "NOT_FOUND: no such life"), NotFoundError)


def test_another_internal_error_stays_one():
    assert told(grpc.StatusCode.INTERNAL, "a defect").code == "INTERNAL"


def test_a_request_reads_as_protobuf_itself_would_have_written_it():
    tensors = {
        "verb": b"open",
        "texts": np.array([b"", b"x" * 300], object),
        "ids": np.arange(70_000, dtype=np.int32),
        "frames": np.arange(12, dtype=np.uint8).reshape(3, 4)[:, ::2],
        "nothing": np.zeros(0, np.float32),
    }
    request = service_pb2.ModelInferRequest.FromString(infer_request("decode", tensors))
    told = [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in request.inputs]
    assert request.model_name == "decode"
    assert told == [
        ("verb", "BYTES", [1]),
        ("texts", "BYTES", [2]),
        ("ids", "INT32", [70_000]),
        ("frames", "UINT8", [3, 2]),
        ("nothing", "FP32", [0]),
    ]
    assert list(request.raw_input_contents) == [
        b"\4\0\0\0open",
        b"\0\0\0\0" + b"\x2c\1\0\0" + b"x" * 300,
        *(tensors[name].tobytes() for name in ("ids", "frames", "nothing")),
    ]
