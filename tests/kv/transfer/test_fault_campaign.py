"""Ten thousand faults of a KV transfer: no wrong row, no hang, nothing held."""

import pytest

from tests.kv.transfer.fault_campaign import BACKENDS, inject_and_check, share_of


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
def test_faults_end_in_the_right_rows_or_a_fitting_error_and_leave_nothing(backend):
    inject_and_check(backend, share_of(backend, 10_000), seed=7)
