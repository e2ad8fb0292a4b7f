"""What grpc says of a call that failed, in our codes: who asked must know whether to try again."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from bireme.errors import NotFoundError
from bireme.workers.base import UnreachableError
from bireme.workers.grpc import rpc_error


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


def test_a_code_of_our_own_wins_over_grpc_s():
    assert isinstance(told(grpc.StatusCode.INTERNAL, "NOT_FOUND: no such life"), NotFoundError)


def test_another_internal_error_stays_one():
    assert told(grpc.StatusCode.INTERNAL, "a defect").code == "INTERNAL"
