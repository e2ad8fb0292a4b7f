from __future__ import annotations

import threading

import numpy as np

from bireme.types import Cancelled, Inputs, RequestInfo, TensorResponse, info_of, size_of


def test_a_callback_is_called_once_when_set():
    cancelled, calls = Cancelled(), []
    cancelled.on_set(lambda: calls.append(1))
    assert not cancelled and not calls
    cancelled.set()
    cancelled.set()
    assert cancelled and calls == [1]


def test_a_callback_that_comes_after_is_called_at_once():
    cancelled, calls = Cancelled(), []
    cancelled.set()
    cancelled.on_set(lambda: calls.append(1))
    assert calls == [1]


def test_a_callback_may_register_another():
    cancelled, calls = Cancelled(), []
    cancelled.on_set(lambda: cancelled.on_set(lambda: calls.append(1)))
    cancelled.set()
    assert calls == [1]


def test_no_callback_is_lost_or_doubled_when_threads_race():
    for _ in range(50):
        cancelled, calls, gate = Cancelled(), [], threading.Barrier(3)

        def register(cancelled=cancelled, calls=calls, gate=gate):
            gate.wait()
            for _ in range(20):
                cancelled.on_set(lambda: calls.append(1))

        threads = [threading.Thread(target=register) for _ in range(2)]
        for thread in threads:
            thread.start()
        gate.wait()
        cancelled.set()
        for thread in threads:
            thread.join()
        assert len(calls) == 40


def test_inputs_carry_what_triton_says_of_the_request():
    inputs = Inputs({"a": np.zeros(1)}, RequestInfo(request_id="r", timeout_ms=5))
    assert info_of(inputs).request_id == "r" and inputs["a"].shape == (1,)
    assert info_of({"a": np.zeros(1)}) == RequestInfo()


def test_plain_tensors_never_merge_and_know_their_size():
    response = TensorResponse({"a": np.zeros(3, np.int32), "b": np.array([b"four"], object)})
    assert response.merge(response) is None
    assert size_of(response) == 16


def test_a_response_that_does_not_know_its_size_is_guessed():
    class Unsized:
        def merge(self, later):
            return None

        def tensors(self):
            return {}

    assert size_of(Unsized()) > 0
