"""The simulator: requests with known statistics, the mocker's timing, real routers, the same figures every time."""

import gzip
import json
import re

import numpy as np
import pytest

from bireme.config import MockerConfig, RouterConfig
from bireme.errors import ConfigError
from bireme.sizing.simulator.cluster import ClusterSettings, simulate
from bireme.sizing.simulator.synthetic import conversations, shared_prefix
from bireme.sizing.simulator.trace import SimulatedRequest, endless_hits, read_traces, spread_out
from bireme.sizing.simulator.worker import SimulatedEngine, SimulatedRun, SimulatedWorker
from bireme.sizing.step_times import StepTimes
from tools import simulate as program

MODEL = MockerConfig(step_ms=10, step_ms_per_request=1, prefill_ms=5, prefill_ms_per_token=0.01)


def request(at, num_prompt, num_output, *blocks):
    return SimulatedRequest(at, num_prompt, num_output, np.array(blocks, np.uint64))


def ran(*requests, num_blocks=1000):
    engine = SimulatedEngine(StepTimes.of_mocker(MODEL), num_blocks, max_num_tokens=1000, max_batch_size=8)
    worker = SimulatedWorker("decode_0", engine)
    runs = [SimulatedRun(one) for one in requests]
    for run in runs:
        worker.advance(run.request.arrival_s)
        worker.submit(run, run.request.arrival_s)
    worker.advance(float("inf"))
    return runs


def test_a_request_alone_takes_the_mockers_time():
    (run,) = ran(request(1.0, 700, 3))
    assert run.first_token_s == pytest.approx(1.0 + 0.010 + 0.005 + 0.007)
    assert run.end_s == pytest.approx(run.first_token_s + 2 * 0.011)


def test_a_long_prompt_is_computed_in_steps_of_the_token_budget():
    (run,) = ran(request(0.0, 2500, 1))
    assert run.first_token_s == run.end_s == pytest.approx(3 * 0.010 + 0.005 + 0.025)


def test_one_that_comes_during_a_step_begins_after_it():
    first, second = ran(request(0.0, 100, 50), request(0.1, 100, 2))
    steps = -(-(0.1 - first.first_token_s) // 0.011)
    began = first.first_token_s + steps * 0.011
    assert second.first_token_s == pytest.approx(began + 0.011 + 0.005 + 0.001)


def test_blocks_are_found_again_and_the_oldest_go_first():
    same = [request(at, 1100, 1, 1, 2) for at in (0, 10, 30)]
    runs = ran(*same[:2], request(20, 1600, 1, 7, 8, 9), same[2], num_blocks=5)
    assert [run.num_cached for run in runs] == [0, 1024, 0, 512]


def test_a_beginning_that_is_being_computed_is_not_computed_again():
    runs = ran(*[request(0.0, 1100, 5, 1, 2) for _ in range(4)])
    assert [run.num_cached for run in runs] == [0, 1024, 1024, 1024]


def test_a_request_that_never_fits_is_said():
    with pytest.raises(ConfigError, match="5 blocks; set more"):
        ran(request(0, 5120, 1), num_blocks=5)


def test_of_the_program_too(capsys):
    assert program.main(["shared_prefix", "--requests", "5", "--blocks", "3", "--modes", "kv"]) == 2
    assert "set more" in capsys.readouterr().err


def test_prefill_apart_is_compared_with_measured_step_times(capsys):
    few = ["day", "--requests", "200", "--rate", "5", "--modes", "round_robin", "--step-times", "h100-8b-bf16"]
    assert program.main([*few, "--prefill-workers", "0,1", "--workers", "1", "--background", "0.5"]) == 0
    printed = capsys.readouterr().out
    aggregated, apart = json.loads(printed.splitlines()[-1])["rows"]
    assert "1+1" in printed and apart["transferred"] > 0 and "transferred" not in aggregated
    assert apart["itl_p99_ms"] < aggregated["itl_p99_ms"] and aggregated["requests"] == apart["requests"] > 150
    assert program.main([*few, "--step-times", "none"]) == 2 and program.main([*few, "--prefill-workers", "-1"]) == 2
    assert "--prefill-workers -1: 0 or more" in capsys.readouterr().err


def test_an_endless_cache_finds_all_that_was_there_but_the_last_token():
    made = [request(0, 1100, 1, 1, 2), request(1, 1100, 1, 1, 3), request(2, 1024, 1, 1, 2)]
    assert endless_hits(made) == [0, 512, 512]


def test_generated_conversations_have_the_statistics_of_the_trace():
    """Those of Mooncake's conversation trace, measured on its 12,031 requests."""
    found = program.statistics_of(conversations(1, 12_031, 12_031 / 3537))
    for name, measured in {"requests": 12_031, "seconds": 3537, "prompt_mean": 12_035, "prompt_p50": 6909,
                           "prompt_p90": 27_367, "answer_mean": 343, "endless_hit_rate": 0.373}.items():  # fmt: skip
        assert found[name] == pytest.approx(measured, rel=0.15), name


def test_a_trace_is_read_and_its_requests_spread_over_their_three_seconds(tmp_path):
    file = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]} for at in (0, 0, 3000)]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = spread_out(read_traces([file]).requests)
    assert [one.arrival_s for one in found] == [0, 1.5, 3]
    assert [len(one.blocks) for one in found] == [2, 2, 2]


def test_a_line_of_another_form_is_named(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n{"a": 1}')
    assert program.main([str(file)]) == 2
    assert "trace.jsonl:2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.jsonl", b"", "empty.jsonl: no requests; name files of a request log or a trace"),
        ("blank.jsonl", b"\n\n", "blank.jsonl: no requests"),
        ("half.jsonl", b'{"schema": "dynamo.request.tr', "half.jsonl:1: no JSON .*was the line cut short"),
        ("access.log", b'127.0.0.1 "GET / HTTP/1.0" 200', "access.log:1: no JSON .*a line has timestamp"),
        ("other.jsonl", b'{"a": 1}', "other.jsonl:1: no schema; a line has timestamp"),
        ("binary.jsonl", b"\xff\xfe\x00", "binary.jsonl:1: no UTF-8 text .*a line has timestamp"),
        ("plain.jsonl.gz", b"plain", "plain.jsonl.gz: can't be read .Not a gzipped file"),
    ],
)
def test_a_file_that_is_no_trace_is_named_with_what_would_be_one(name, content, told, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    assert program.main([str(tmp_path / name)]) == 2
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--blocks=0", "--blocks: 0; 1 or more"),
        ("--speed=0", "--speed: 0; more than 0"),
        ("--step-ms=nan", "--step-ms: nan; 0 or more"),
        ("--workers=x", "--workers: 'x'; numbers with commas between them"),
        ("--background=2", "--background 2: a share of the requests"),
        ("--config={", "--config {: no JSON"),
        ("--plot=/nowhere/a.png", "/nowhere is no folder"),
    ],
)
def test_an_option_out_of_its_bounds_names_itself(option, told, capsys):
    try:
        status = program.main(["day", option])
    except SystemExit as left:
        status = left.code
    assert status == 2 and told in capsys.readouterr().err


def ended(number, at_ms, num_prompt, *hashes, size=4, **more):
    """A record as Dynamo documents it."""
    replay = {"trace_block_size": size, "input_length": num_prompt, "input_sequence_hashes": hashes}
    request = {"request_id": f"r{number}", "request_received_ms": at_ms, "output_tokens": 7, "replay": replay}
    record = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": at_ms + 9}
    return record | {"request": request} | more


def written(path, *rows):
    text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_request_logs_are_read_from_several_files_compressed_ones_too(tmp_path):
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": 5, "tool": {}}
    plain = written(tmp_path / "a.jsonl", ended(1, 1_700_000_002_500, 9, 5, 6, 7), tool)
    packed = written(tmp_path / "b.jsonl.gz", {"timestamp": 3, "event": ended(2, 1_700_000_001_000, 8, 5, 9)})
    trace = read_traces([plain, packed])
    assert trace.tokens_per_block == 4
    assert [(one.arrival_s, one.num_prompt, one.num_output) for one in trace.requests] == [(0, 8, 7), (1.5, 9, 7)]
    assert [one.blocks.tolist() for one in trace.requests] == [[5, 9], [5, 6]]
    assert endless_hits(trace.requests, trace.tokens_per_block) == [0, 4]


def test_a_request_log_is_simulated_with_its_own_blocks(tmp_path, capsys):
    rows = [ended(number, 1000 * number, 64, *range(15), 100 + number) for number in range(20)]
    file = written(tmp_path / "log.jsonl", *rows)
    assert program.main([str(file), "--modes", "kv", "--blocks", "100", "--workers", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["statistics"]["requests"] == 20 == found["rows"][0]["requests"]
    assert found["statistics"]["endless_hit_rate"] == pytest.approx(19 * 60 / (20 * 64))
    assert found["rows"][0]["hits_of_endless"] > 0.9


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ('{"schema": "dynamo.request.trace.v1", "event_ty', "log.jsonl:2: no JSON (Unterminated string"),
        (json.dumps(ended(1, 5, 4, 1)), "log.jsonl:2: ValueError('request_id r1 is that of "),
        (json.dumps(ended(2, 5, 5, 1)), "log.jsonl:2: ValueError('1 hashes for 5 tokens in blocks of 4')"),
        (json.dumps(ended(2, 5, 5, 1, size=8)), "log.jsonl:2: blocks of 8 tokens, in "),
        (json.dumps({"schema": "other", "event_type": "x"}), "log.jsonl:2: ValueError('schema other')"),
        ("[]", "log.jsonl:2: a JSON object is expected"),
    ],
)
def test_a_line_that_can_t_be_replayed_is_named(tmp_path, capsys, second, text):
    file = tmp_path / "log.jsonl"
    file.write_text(f"{json.dumps(ended(1, 1, 4, 1))}\n{second}")
    assert program.main([str(file)]) == 2
    assert text in capsys.readouterr().err


def test_a_compressed_file_that_was_cut_short_is_named_with_its_line(tmp_path, capsys):
    file = written(tmp_path / "log.jsonl.gz", *[ended(number, 1, 4, number) for number in range(50)])
    file.write_bytes(file.read_bytes()[:-40])
    assert program.main([str(file)]) == 2
    error = capsys.readouterr().err
    assert "log.jsonl.gz:" in error and "cut short" in error


def test_a_compressed_file_that_is_damaged_is_named(tmp_path, capsys):
    file = written(tmp_path / "log.jsonl.gz", *[ended(number, 1, 4, number) for number in range(50)])
    whole = file.read_bytes()
    file.write_bytes(whole[:40] + bytes(60) + whole[100:])
    assert program.main([str(file)]) == 2
    assert "log.jsonl.gz" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_figures():
    made = shared_prefix(3, 200, 20, 0.5)
    first, again, other = (simulate(made, "kv", ClusterSettings(num_routers=2, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_mode_kv_computes_less_than_turns_do():
    made = shared_prefix(3, 300, 10, 0.9)
    settings = ClusterSettings(router=RouterConfig(decode_weight=0.1))
    by_cost, in_turns = (simulate(made, mode, settings).summary() for mode in ("kv", "round_robin"))
    assert by_cost["computed_tokens"] < 0.9 * in_turns["computed_tokens"]
    assert by_cost["predicted_over_actual"] == pytest.approx(1, abs=0.02)


def test_numbers_of_workers_are_compared_and_must_be_some(capsys, tmp_path):
    few = ["multi_turn", "--requests", "100", "--rate", "30", "--modes", "kv", "--workers", "1,3"]
    assert program.main([*few, "--plot", str(tmp_path / "sizes.png")]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["workers"] for row in rows] == [1, 3] and rows[0]["itl_p50_ms"] > rows[1]["itl_p50_ms"]
    assert program.main(["agentic", "--workers", "2,0"]) == 2
    assert "--workers 0: 1 or more" in capsys.readouterr().err
