"""When memory counts as flat, and what a metrics page says is left behind."""

from benchmarks.load.load_process import to_arguments
from benchmarks.load.memory import measure_growth
from benchmarks.load.metrics_page import left_behind

PAGE = """\
# HELP bireme_kv_blocks_used KV blocks referenced by requests or leases.
# TYPE bireme_kv_blocks_used gauge
bireme_kv_blocks_used{worker="decode"} 3
# HELP bireme_kv_leases Leases
# TYPE bireme_kv_leases gauge
bireme_kv_leases{worker="prefill",state="exported"} 0
# HELP bireme_kv_blocks_total KV blocks of the pool.
# TYPE bireme_kv_blocks_total gauge
bireme_kv_blocks_total{worker="decode"} 100
"""


def test_noise_is_flat():
    growth = measure_growth(range(30), [100 + (i % 3) for i in range(30)], allowed_mb=8)
    assert growth.is_flat and abs(growth.slope_mb_per_min) < 1


def test_a_leak_is_not_flat():
    growth = measure_growth(range(60), [100.0 + i for i in range(60)], allowed_mb=8)
    assert not growth.is_flat
    assert round(growth.slope_mb_per_min) == 60
    assert "+60.00 MB/min" in growth.describe()


def test_a_short_time_is_not_judged():
    assert measure_growth(range(30), [100.0 + 10 * i for i in range(30)], allowed_mb=8).is_flat


def test_memory_that_shrinks_is_flat():
    assert measure_growth(range(9), [200.0 - i for i in range(9)], allowed_mb=0).is_flat


def test_only_gauges_of_use_are_left_behind():
    assert left_behind(PAGE) == {"bireme_kv_blocks_used{worker=decode}": 3}


def test_options_become_arguments():
    options = {"streams": 4, "stall_s": 0.5, "stagger": True, "drop": None, "stream_per_request": False}
    assert to_arguments(options) == ["--streams", "4", "--stall-s", "0.5", "--stagger"]
