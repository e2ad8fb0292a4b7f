"""Faults of a KV transfer over every backend that runs here; tests/kv/transfer/test_fault_campaign.py has thousands."""

import pytest

from tests.kv.transfer.fault_campaign import BACKENDS, inject_and_check, share_of


@pytest.mark.parametrize("backend", BACKENDS)
def test_faults_end_in_the_right_rows_or_a_fitting_error_and_leave_nothing(backend):
    inject_and_check(backend, share_of(backend, 1000), seed=11)
