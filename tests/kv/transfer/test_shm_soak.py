"""Random operations from several threads: in the end nothing is held."""

from __future__ import annotations

import random
import time

import pytest

from bireme.errors import BiremeError, DeadlineExceededError
from tests.kv.transfer.kv_side import files_of, wait_until


@pytest.mark.parametrize("backend", ["shm", "cuda_ipc", "mapped"])
@pytest.mark.parametrize(("seed", "timeout_ms"), [(7, 60_000), (8, 1500)])
def test_two_hundred_random_operations_leave_no_lease_and_no_file(make_side, tmp_path, backend, seed, timeout_ms):
    dice = random.Random(seed)
    prefill = make_side("prefill", max_tokens=120, timeout_ms=timeout_ms)
    decodes = [make_side("decode"), make_side("decode_1")]
    fetchings, leases, exported = [], [], []
    for _ in range(200):
        act = dice.choice(["export", "export", "fetch", "fetch", "cancel", "abort", "reserve", "replay"])
        if act == "reserve":
            leases.append(prefill.reserve())
        elif act == "export":
            leases.append(prefill.reserve())
            delay_s = dice.choice([0, 0, 0.0002])
            exported.append(prefill.export_lease(leases[-1], dice.randint(1, 120), delay_s))
        elif act == "fetch" and exported:
            params = exported.pop(dice.randrange(len(exported)))
            firsts = (dice.randint(0, params.num_tokens), dice.randint(0, params.num_tokens))
            fetchings.append(dice.choice(decodes).fetch(params, firsts, dice.choice([0, 0, 0.0002])))
        elif act == "replay" and exported:
            fetchings += [dice.choice(decodes).fetch(exported[-1]) for _ in range(2)]
        elif act == "cancel" and fetchings:
            dice.choice(fetchings).handle.cancel()
        elif act == "abort" and leases:
            dice.choice(leases).abort()
        time.sleep(dice.choice([0, 0, 0.001]))
    errors = [fetching.result() for fetching in fetchings]
    for lease in leases:
        if lease.state.value == "reserved" or timeout_ms == 60_000:
            lease.abort()
    assert all(error is None or isinstance(error, BiremeError) for error in errors)
    assert timeout_ms == 1500 or not any(isinstance(error, DeadlineExceededError) for error in errors)
    assert errors.count(None) > 20
    assert all(fetching.num_done == 1 for fetching in fetchings)
    # What was read of freed blocks before the refusal came lies in rows that nobody uses.
    taken = [fetching for fetching, error in zip(fetchings, errors, strict=True) if error is None or backend == "shm"]
    assert all(fetching.is_right for fetching in taken)
    wait_until(lambda: not prefill.lease_counts() and prefill.num_released == len(leases))
    wait_until(lambda: not files_of(tmp_path, "prefill"))
    assert prefill.transfer._exporter.buffer.used_bytes == 0
