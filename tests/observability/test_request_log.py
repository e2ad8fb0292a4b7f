"""The request log: what a line says and what it keeps to itself, and what becomes of lines that the disk won't take."""

import gzip
import json
import threading
import time

import numpy as np
import pytest

from bireme.config import ObservabilityConfig, RequestLogConfig
from bireme.messages import Usage
from bireme.metrics import Registry
from bireme.observability import request_log
from bireme.observability.request_log import RequestLog, block_hashes, hash_key
from bireme.observability.rotated_files import RotatedFiles
from bireme.request_trace import RequestTrace, TracedSequence
from bireme.serving_options import ServingOptions
from bireme.sizing.simulator.trace import endless_hits, read_traces

KEY = b"k" * 32
USAGE = Usage(
    prompt_tokens=10, cached_tokens=4, completion_tokens=3, queue_ms=1.5, prefill_ms=20, transfer_ms=2.5, decode_ms=30,
    prefill_worker="prefill", decode_worker="decode_1",
)  # fmt: skip


@pytest.fixture
def opened(tmp_path):
    """Return a log of blocks of 4 tokens with a registry; closed at the end."""
    found = []

    def opened(**more):
        files = RotatedFiles(tmp_path / "log", "generate", 1 << 20, 3)
        found.append(RequestLog(files, more.get("size", 4), more.get("key", KEY), "tiny", Registry("generate")))
        return found[-1]

    yield opened
    for log in found:
        log.close()


def traced(*prompts, usage=USAGE, reason="stop", error="", **options):
    """Return the trace of a request with a sequence for each prompt."""
    trace = RequestTrace("POST /v1/completions", None, False, time.monotonic() - 1.0)
    for index, prompt in enumerate(prompts):
        sequence = TracedSequence(index, np.array(prompt, np.int32), ServingOptions(**options), usage, reason)
        sequence.num_tokens = usage.completion_tokens if usage is not None else 2
        sequence.first_token_us = trace.root.start_us + 250_000
        trace.sequences.append(sequence)
        trace.begin("attempt", number=1, sequence=index)
    trace.request_id, trace.tenant = "mine", "alice"
    trace.finish(error)
    return trace


def lines(folder):
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def counts(log):
    """Return what has been counted since the last look."""
    return {labels[-1]: value for _, labels, value in log._metrics.take_delta().counters}


def test_a_line_has_the_form_that_dynamo_documents(tmp_path, opened):
    log, trace = opened(), traced(range(10), session_id="talk")
    log.note(trace)
    log.close()
    (line,) = lines(tmp_path)
    assert (line["schema"], line["event_type"]) == ("dynamo.request.trace.v1", "request_end")
    assert line["agent_context"] == {"session_id": "talk"}
    assert line["event_time_unix_ms"] == trace.root.end_us // 1000
    request = line["request"]
    replay = request.pop("replay")
    assert (replay["trace_block_size"], replay["input_length"]) == (4, 10)
    assert len(replay["input_sequence_hashes"]) == 3 and max(replay["input_sequence_hashes"]) < 1 << 64
    assert request.pop("request_id").startswith(f"{trace.trace_id}-")
    assert request.pop("total_time_ms") == pytest.approx(1000, abs=500)
    assert request.pop("avg_itl_ms") == pytest.approx(375, abs=250)
    assert request == {
        "x_request_id": "mine", "model": "tiny", "input_tokens": 10, "output_tokens": 3, "cached_tokens": 4,
        "request_received_ms": trace.root.start_us // 1000, "prefill_wait_time_ms": 1.5, "prefill_time_ms": 20.0,
        "ttft_ms": 250.0, "kv_hit_rate": 0.4, "kv_transfer_estimated_latency_ms": 2.5,
        "finish_reason_metadata": {"finish_reason": "stop"},
    }  # fmt: skip
    assert line["bireme"] == {
        "outcome": "stop", "entry": "POST /v1/completions", "trace_id": trace.trace_id, "key": "alice",
        "prefill_worker": "prefill", "decode_worker": "decode_1", "attempts": 1, "decode_ms": 30.0,
    }  # fmt: skip


def test_each_sequence_of_a_request_is_a_line_with_an_id_of_its_own(tmp_path, opened):
    log = opened()
    log.note(traced(range(5), range(5)))
    log.note(traced(range(5)))
    log.close()
    assert len({line["request"]["request_id"] for line in lines(tmp_path)}) == 3
    assert len(read_traces([*tmp_path.glob("*.jsonl")]).requests) == 3


def test_a_request_that_failed_says_how_and_one_that_reached_no_engine_is_no_line(tmp_path, opened):
    log = opened()
    log.note(traced(range(5), usage=None, reason="", error="UNAVAILABLE: no worker, and a secret"))
    log.note(traced(error="INVALID_ARGUMENT: max_tokens"))
    log.close()
    (line,) = lines(tmp_path)
    assert line["bireme"]["outcome"] == "UNAVAILABLE" and line["request"]["output_tokens"] == 2
    assert "secret" not in json.dumps(line)


def test_a_prompt_with_pictures_is_left_out_and_counted(tmp_path, opened):
    log, trace = opened(), traced(range(5))
    trace.begin("pictures")
    log.note(trace)
    log.close()
    assert lines(tmp_path) == [] and counts(log) == {"left_out": 1}


def test_prompts_that_begin_alike_share_hashes_and_a_last_block_may_be_short():
    key = hash_key(KEY, "", "")
    first, second = (block_hashes(np.array(prompt, np.int32).tobytes(), 4, key) for prompt in (range(10), range(12)))
    assert first[:2] == second[:2] and first[2] != second[2] and len(first) == len(second) == 3
    other = block_hashes(np.array([9, *range(1, 10)], np.int32).tobytes(), 4, key)
    assert not set(first) & set(other)
    assert block_hashes(b"", 4, key) == []


def test_tenants_have_no_hash_in_common_whatever_they_send():
    prompt = np.arange(64, dtype=np.int32).tobytes()
    keys = [hash_key(KEY, "a", ""), hash_key(KEY, "b", ""), hash_key(KEY, "", ""), hash_key(KEY, "", "a")]
    keys.append(hash_key(b"another deployment", "a", ""))
    found = [hash for key in keys for hash in block_hashes(prompt, 4, key)]
    assert len(set(found)) == len(found) == 5 * 16


def test_a_disk_that_takes_nothing_loses_lines_and_holds_nobody_up(tmp_path, opened, monkeypatch):
    log = opened()
    log._files._path = tmp_path / "gone" / "log"  # as if the folder had been removed
    log.note(traced(range(5)))
    log.note(traced(range(5)))
    wait_for(lambda: not log._noted)
    log._files._path = tmp_path / "log"
    log.note(traced(range(5)))
    log.close()
    assert len(lines(tmp_path)) == 1 and counts(log) == {"lost": 2, "written": 1}


def test_a_disk_that_hangs_fills_the_queue_and_nothing_else(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(request_log, "MAX_QUEUED_BYTES", 10 * 2100)
    log, goes_on, is_hanging = opened(), threading.Event(), threading.Event()
    write = log._files.write

    def hang(data):
        is_hanging.set()
        assert goes_on.wait(30)
        write(data)

    log._files.write = hang
    log.note(traced(range(5)))
    assert is_hanging.wait(30)
    for _ in range(20):
        log.note(traced(range(5)))
    goes_on.set()
    log.close()
    found = counts(log)
    assert found["lost"] == 20 - 10 and found["written"] == 1 + 10 == len(lines(tmp_path))


def test_a_burst_makes_no_file_larger_than_the_bound(tmp_path):
    log = RequestLog(RotatedFiles(tmp_path / "log", "chat", 8192, 100), 4, KEY, "tiny", Registry("chat"))
    for _ in range(100):
        log.note(traced(range(40)))
    log.close()
    sizes = [len(gzip.decompress(path.read_bytes())) for path in tmp_path.glob("*.gz")]
    assert len(sizes) > 5 and max(sizes) <= 8192


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_was_logged_is_simulated_with_the_same_lengths_and_the_same_sharing(tmp_path, opened):
    log, prompts = opened(), [[*range(20), *range(100 * number, 100 * number + 7)] for number in range(1, 6)]
    for prompt in prompts:
        log.note(traced(prompt))
    log.close()
    trace = read_traces([*tmp_path.glob("*.jsonl")])
    assert trace.tokens_per_block == 4
    assert sorted(one.num_prompt for one in trace.requests) == [27] * 5
    assert [one.num_output for one in trace.requests] == [3] * 5
    assert endless_hits(trace.requests, 4) == [0, *[20] * 4]


def test_the_path_is_the_recipes_and_names_of_the_environment_count(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGS", str(tmp_path))
    assert request_log.path_of(RequestLogConfig(path="$LOGS/requests"), "/recipe") == tmp_path / "requests"
    assert str(request_log.path_of(RequestLogConfig(path="requests"), "/recipe")) == "/recipe/requests"
    assert ObservabilityConfig().request_log.path == ""
