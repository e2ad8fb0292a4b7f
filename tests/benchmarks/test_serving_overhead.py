"""The arithmetic of benchmarks/serving_overhead.py."""

import array

from benchmarks.serving_overhead import Run, add_shares, by_kind, combine, read_steps, row

REPORT = {
    "tokens_per_s": 11500.0,
    "ttft_p50_ms": 20.0,
    "ttft_p99_ms": 30.0,
    "itl_p50_ms": 5.2,
    "itl_p99_ms": 5.4,
    "gap_p99_ms": 6.0,
    "errors": {},
}
STEPS = [0.005] * 99 + [0.006]


def cell_of(path="decode", streams=64, step_ms=5.0, steps=STEPS, **changes):
    cell = combine(path, step_ms, streams, [[Run(REPORT | changes, {"client": 0.4, "server": 0.7}, steps)]])
    add_shares([cell])
    return cell


def test_the_share_is_of_streams_over_step():
    cell = cell_of()
    assert cell.share == round(11500 / 12800, 4)
    assert cell.target == 0.88 and cell.verdict == "ok"


def test_a_share_below_the_target_is_not_met():
    assert cell_of(tokens_per_s=11000.0).verdict == "BELOW"


def test_a_slow_engine_step_is_not_met():
    assert cell_of(steps=[0.005] * 90 + [0.009] * 10).verdict == "STEP"


def test_there_is_no_target_elsewhere():
    assert cell_of(step_ms=10.0).verdict == ""
    assert cell_of(streams=16).verdict == ""


def test_without_a_pace_the_share_is_of_the_engine_in_process():
    engine, decode = cell_of("engine", step_ms=0.0, tokens_per_s=1000.0), cell_of(step_ms=0.0, tokens_per_s=250.0)
    add_shares([engine, decode])
    assert (engine.share, decode.share) == (1.0, 0.25)


def test_a_cell_is_the_median_of_its_runs():
    runs = [Run(REPORT | {"tokens_per_s": rate, "errors": {"lost": 1}}, {}, []) for rate in (1.0, 9.0, 2.0)]
    cell = combine("bus", 5.0, 64, [runs])
    assert cell.tokens_per_s == 2.0 and cell.tokens_per_s_range == (1.0, 9.0) and cell.errors == {"lost": 3}


def test_several_starts_are_judged_by_the_worst():
    def aim(*rates):
        return combine("decode", 5.0, 64, [[Run(REPORT | {"tokens_per_s": rate}, {}, [])] for rate in rates]).aim

    assert aim(12000.0) == ""
    assert aim(12000.0, 12800.0, 11520.0).endswith(
        "worst of 3 starts 90.0% (to 100.0%, median 93.8%), 88% asked for: ok"
    )
    assert aim(12000.0, 11000.0, 10000.0).endswith("BELOW in 2")


def test_idle_stubs_are_added_up():
    assert by_kind({"server": 0.0, "decode.stub": 0.5, "chat.stub": 0.001, "video.stub": 0.002, "client": 0.1}) == {
        "server": 0.0,
        "decode.stub": 0.5,
        "client": 0.1,
        "other": 0.003,
    }


def test_steps_are_those_of_the_measured_time(tmp_path):
    log = tmp_path / "steps"
    log.write_bytes(array.array("f", [9.0, 2.0, 1.0, 9.0]).tobytes())
    assert read_steps(log, 4, 12) == [1.0, 2.0]
    assert read_steps(tmp_path / "none", 0, 0) == []


def test_a_row_says_whether_the_target_is_met():
    assert "88% ok" in row(cell_of())
    assert "88% BELOW" in row(cell_of(tokens_per_s=1.0))
