"""Step times out of a request log: found again where they are known, refused where a log says too little."""

import json
import random

import pytest

from bireme.errors import ConfigError
from bireme.sizing.log_times import log_times, read_log

HOP_MS = 3.0


def record(number, at_ms, prompt, output, *, rows=1, cached=0, apart=False):
    """A request of an engine whose prompts take 5 ms and 0.1 a token, and whose steps 10 ms and 2 a row."""
    prompt_ms, gap_ms = 5 + 0.1 * (prompt - cached), 10 + 2 * rows
    transfer_ms = 4 + 0.002 * prompt if apart else 0.0
    ttft_ms = HOP_MS + prompt_ms + transfer_ms
    request = {
        "request_id": str(number), "input_tokens": prompt, "output_tokens": output, "request_received_ms": at_ms,
        "ttft_ms": ttft_ms, "total_time_ms": ttft_ms + gap_ms * (output - 1), "cached_tokens": cached,
        "prefill_wait_time_ms": 0.0, "prefill_time_ms": prompt_ms, "kv_transfer_estimated_latency_ms": transfer_ms,
    }  # fmt: skip
    own = {"decode_worker": "decode", "prefill_worker": "prefill" if apart else "", "attempts": 1}
    return {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request, "bireme": own}


def logged(tmp_path, records):
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return read_log([path])


def quiet_day(apart, num=240):
    """Alone, or four that begin one after the other and decode side by side."""
    draw, records, at_ms = random.Random(1), [], 0.0
    for number in range(num):
        prompt = draw.choice([100, 400, 1600])
        records.append(record(number, at_ms, prompt, 40, apart=apart))
        at_ms += 5000
    return records


@pytest.mark.parametrize("apart", [False, True])
def test_prompts_gaps_and_the_way_are_found_again(tmp_path, apart):
    found = log_times(logged(tmp_path, quiet_day(apart)))
    assert found.times.step_ms(0, 800, prompts=1) == pytest.approx(85, rel=0.05)
    assert found.times.step_ms(1, context=400) == pytest.approx(12, rel=0.05)
    assert found.hop_ms == pytest.approx(HOP_MS, abs=0.01)
    assert found.times.table.transfer.seconds(1000) == pytest.approx(0.006 if apart else 0.0, rel=0.05)


def test_rows_beside_a_request_make_its_steps_longer(tmp_path):
    records = quiet_day(apart=True, num=60)
    for number in range(100, 220):  # four at once
        records.append(record(number, 1e6 + number // 4 * 9000, 100, 60, rows=4, apart=True))
    found = log_times(logged(tmp_path, records))
    alone, beside = found.times.step_ms(1, context=120), found.times.step_ms(4, context=520)
    assert (alone, beside) == (pytest.approx(12, rel=0.1), pytest.approx(18, rel=0.1))


def test_a_log_that_says_too_little_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"5 answers that no prompt disturbed, 20 are needed .*record_steps"):
        log_times(logged(tmp_path, quiet_day(apart=False)[:5]))
    bad = quiet_day(apart=False)[0]
    bad["request"]["ttft_ms"] = "soon"
    with pytest.raises(ValueError, match=r"requests.jsonl:1: .*ttft_ms"):
        logged(tmp_path, [bad])


def test_what_was_tried_again_or_not_told_of_does_not_count(tmp_path):
    again, untold = quiet_day(apart=False)[:2]
    again["bireme"]["attempts"] = 2
    del untold["request"]["prefill_time_ms"]
    assert logged(tmp_path, [again, untold]) == []
