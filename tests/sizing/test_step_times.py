"""What steps cost: a rule that is fitted to a table finds it again, and what is wrong with a table is said."""

import json

import msgspec
import numpy as np
import pytest

from bireme.config import MockerConfig
from bireme.errors import ConfigError
from bireme.kv.wire.step_records import NOTHING_QUEUED, ScheduledRequests, StepRecord
from bireme.sizing.step_times import (
    FORMAT,
    Line,
    StepPoint,
    StepTable,
    StepTimes,
    TransferTimes,
    least_squares,
    published,
)
from tools import record_steps


def true_ms(rows, tokens, context, prompts=0, read=0):
    ms = 5 + 0.03 * rows + 0.00005 * (context + read)
    return ms + 0.02 * tokens + 0.5 * prompts + 1e-6 * tokens * read if tokens else ms


def point(rows, tokens, context, prompts=0, read=0):
    return StepPoint(
        decode_rows=rows, prefill_tokens=tokens, context_tokens=context + read, prompts=prompts,
        prefill_context_tokens=read, ms=true_ms(rows, tokens, context, prompts, read),
    )  # fmt: skip


POINTS = [
    *(point(rows, 0, context * rows) for rows in (1, 16, 64) for context in (1000, 8000)),
    *(
        point(rows, tokens, 1000 * rows, prompts, read)
        for rows in (0, 1, 16)
        for tokens in (128, 2048)
        for prompts, read in ((1, 0), (3, 0), (0, 4096))
    ),
]
TABLE = StepTable(format=FORMAT, engine="torch", machine="made up", points=POINTS)


@pytest.mark.parametrize(
    ("rows", "tokens", "context", "prompts", "read"),
    [(8, 0, 8000, 0, 0), (64, 2048, 9000, 2, 0), (0, 1000, 0, 1, 2000), (100, 0, 500_000, 0, 0), (3, 4096, 12, 1, 0)],
)
def test_a_rule_says_of_other_steps_what_the_points_follow(rows, tokens, context, prompts, read):
    times = StepTimes.of(TABLE)
    found = times.step_ms(rows, tokens, context + read, prompts, tokens * read)
    assert times.error < 1e-9
    assert found == pytest.approx(true_ms(rows, tokens, context, prompts, read))


def test_a_step_with_both_may_cost_more_than_its_parts():
    parts = [(1, 0, 5.0), (8, 0, 6.0), (0, 100, 7.0), (0, 200, 8.0), (8, 100, 10.0), (8, 200, 11.0), (1, 100, 9.0)]
    points = [StepPoint(decode_rows=r, prefill_tokens=t, context_tokens=0, ms=ms) for r, t, ms in parts]
    times = StepTimes.of(msgspec.structs.replace(TABLE, points=points))
    assert [times.step_ms(r, t) for r, t, _ in parts] == pytest.approx([ms for *_, ms in parts])


def test_a_line_bends_at_its_knots_and_goes_on():
    line = Line.of([10, 20], [1.0, 0.5])
    assert [line(value) for value in (0, 5, 10, 12, 20, 40)] == [0, 5, 10, 11, 15, 25]


def test_terms_are_not_negative_though_that_would_fit_better():
    design = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_squares(design, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])
    assert least_squares(design, np.array([3.0, 5.0, 7.0])).tolist() == pytest.approx([1.0, 2.0])


def test_the_mocker_s_times_are_its_own():
    times = StepTimes.of_mocker(
        MockerConfig(step_ms=8, step_ms_per_request=0.5, prefill_ms=2, prefill_ms_per_token=0.1)
    )
    assert times.step_ms(6) == 8 + 6 * 0.5
    assert times.step_ms(6, 100, 12345, 2, 99) == pytest.approx(8 + 6 * 0.5 + 2 * 2 + 100 * 0.1)


def test_a_transfer_takes_a_start_and_its_bytes():
    assert TransferTimes(start_ms=2, bytes_per_token=1000, bytes_per_s=1e6).seconds(50) == pytest.approx(0.052)
    assert TransferTimes(start_ms=2, bytes_per_token=1000).seconds(50) == 0.002


def record(rows, tokens, context, prompts=0, slower=1.0):
    done = ScheduledRequests(prompts, tokens, 0.0, 0, rows, context, 0.0)
    return StepRecord(
        wall_time=slower * true_ms(rows, tokens, context, prompts) / 1e3, scheduled_requests=done,
        queued_requests=NOTHING_QUEUED, ts=1.0, worker_id="decode_0",
    )  # fmt: skip


def written(path, records):
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records))
    return path


def test_records_are_fitted_though_now_and_then_a_step_is_disturbed(tmp_path, capfd):
    steps = [(rows, tokens) for rows in (0, 1, 8, 32) for tokens in (0, 64, 256, 1024) if rows + tokens]
    records = [
        record(rows, tokens, 500 * rows, 1 if tokens else 0, slower=9.0 if again == 3 else 1.0)
        for rows, tokens in steps
        for again in range(5)
    ]
    records += [StepRecord(wall_time=0, scheduled_requests=ScheduledRequests(), queued_requests=NOTHING_QUEUED, ts=1)]
    source, table = written(tmp_path / "steps.jsonl", records), tmp_path / "times.json"
    named = ("--engine", "torch", "--machine", "here", "--output", str(table))
    assert record_steps.main(["--fit", str(source), *named]) == 0
    assert "0.0% off" in capfd.readouterr().err
    times = StepTimes.read(str(table))
    assert (times.table.engine, times.table.machine) == ("torch", "here")
    assert times.step_ms(16, 512, 8000, 1) == pytest.approx(true_ms(16, 512, 8000, 1))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", r"times.json: no table of step times \(Input data was truncated\); tools/record_steps.py --fit"),
        ('{"format": "x", "engine": "", "machine": "", "points": []}', "format: 'x'; bireme.step_times.v1 is read"),
        (f'{{"format": "{FORMAT}", "engine": "", "machine": "", "points": []}}', "points: 0 with work; 2 to 100,000"),
        (
            json.dumps({"format": FORMAT, "engine": "", "machine": "", "points": [{"decode_rows": -1}]}),
            r"`int` >= 0 - at `\$.points",
        ),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path, text, error):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        StepTimes.read(str(path))


def test_a_step_that_takes_no_time_is_refused():
    points = [StepPoint(decode_rows=one, prefill_tokens=0, context_tokens=0, ms=0.0) for one in (1, 2)]
    with pytest.raises(ConfigError, match="more than 0"):
        StepTimes.of(msgspec.structs.replace(TABLE, points=points))


def test_a_line_that_is_no_record_is_named(tmp_path, capsys):
    source = written(tmp_path / "steps.jsonl", [record(1, 0, 1)])
    source.write_bytes(source.read_bytes() + b"{}\n")
    assert record_steps.main(["--fit", str(source)]) == 2
    assert "line 2: no step record" in capsys.readouterr().err
    assert record_steps.main(["--fit", str(tmp_path / "none")]) == 2


def test_published_tables_are_followed_by_their_rule():
    assert {"h100-8b-bf16", "tiny-chat-cpu"} <= set(published())
    for name in published():
        times = StepTimes.read(name)
        assert times.error < 0.25 and times.table.source and times.table.machine
    with pytest.raises(ConfigError, match=r"none: No such file or directory; a file, or one of .*h100-8b-bf16"):
        StepTimes.read("none")


def test_a_published_table_is_another_machines_so_its_error_is_a_tenth_at_least(tmp_path):
    found = StepTimes.read("h100-8b-bf16")
    found.write(tmp_path / "own.json")
    own = StepTimes.read(str(tmp_path / "own.json"))
    assert own.error < 0.1 <= found.error and own.rows == found.rows
