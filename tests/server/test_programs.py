"""Every program of tools/, benchmarks/ and models/, run end to end as its user would, at its smallest size.

A program of its own tests is in ELSEWHERE. tests/repository/test_programs_are_run.py finds one that is in neither.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bireme.config import CHECKOUT
from bireme.launch import free_port
from tests.server.programs import RUNS

pytestmark = pytest.mark.server


@pytest.fixture
def run(tmp_path, sample_model):
    """Return a function: program -> its finished process; a failure shows what it printed."""
    sample_model("llama")

    def run(program):
        places = {"folder": tmp_path, "port": free_port()}
        arguments = [argument.format(**places) for argument in RUNS[program]]
        done = subprocess.run(
            [sys.executable, program, *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    return run


def last_line(done):
    return json.loads(done.stdout.splitlines()[-1])


SLOW = ("tools/make_sample_model.py", "models/train.py")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=[pytest.mark.soak] if name in SLOW else [])
        for name in RUNS
        if name.startswith(("tools/", "models/"))
    ],
)
def test_a_tool_or_trainer_runs(run, program):
    run(program)


@pytest.mark.soak
@pytest.mark.parametrize(
    "program",
    [
        "benchmarks/arrivals_gpu.py", "benchmarks/arrivals_served.py", "benchmarks/attention_gpu.py",
        "benchmarks/engine_gpu.py", "benchmarks/engine_soak.py", "benchmarks/fabric_gpu.py",
        "benchmarks/first_requests_gpu.py", "benchmarks/guided_gpu.py", "benchmarks/int4_products.py",
        "benchmarks/kv_tiers.py",
        "benchmarks/quantized_cpu.py", "benchmarks/quantized_gpu.py", "benchmarks/router.py", "benchmarks/routing.py",
        "benchmarks/speculation_cpu.py", "benchmarks/speculation_gpu.py",
        "benchmarks/routing_grid.py",
        "benchmarks/step_shares_gpu.py", "benchmarks/step_table_gpu.py",
        "benchmarks/transfer.py", "benchmarks/transfer_gpu.py",
        "benchmarks/memory_estimate.py", "benchmarks/perplexity.py",
    ],
)  # fmt: skip
def test_a_benchmark_ends_without_an_error(run, program):
    run(program)


def test_serving_overhead_measures_every_path_without_an_error(run):
    cells = last_line(run("benchmarks/serving_overhead.py"))["cells"]
    assert [cell["path"] for cell in cells] == ["engine", "bus", "decode", "generate"]
    assert all(cell["tokens_per_s"] > 0 and not cell["errors"] for cell in cells)


def test_seeded_streams_finds_that_in_float32_none_differs(run):
    rows = last_line(run("benchmarks/seeded_streams.py"))["rows"]
    assert [(row["among_others"], row["after_migration"]) for row in rows] == [(0, 0)] * 3


def test_draws_says_what_each_filter_takes(run):
    assert run("benchmarks/draws.py").stdout.count(" cpu=") == 10


@pytest.mark.soak
def test_engine_cpu_measures_the_engine_and_both_ways_of_transformers(run):
    (row,) = last_line(run("benchmarks/engine_cpu.py"))["rows"]
    assert row["engine_ms"] > 0 and row["generate_ms"] > 0 and row["continuous_ms"] > 0


@pytest.mark.soak
def test_serving_gpu_gets_every_token_by_each_way(run):
    *_, figures, _, _ = run("benchmarks/serving_gpu.py").stdout.splitlines()
    rates = json.loads(figures)["tokens_per_s"]
    assert list(rates) == ["in process", "generate", "frontend"] and all(one[0] > 0 for one in rates.values())


@pytest.mark.soak
def test_disaggregation_gpu_measures_both_ways(run):
    lines = run("benchmarks/disaggregation_gpu.py").stdout.splitlines()
    (figures,) = (json.loads(line)["figures"] for line in lines if line.startswith("{"))
    assert all(list(ways)[:2] == ["aggregated", "disaggregated"] for ways in figures.values())
    assert [name for name, ways in figures.items() if "measured" in ways and len(ways) == 3][0] == "16: first token, ms"
    assert figures["transfer, ms"]["aggregated"] == [0] and figures["transfer, ms"]["disaggregated"][0] > 0


@pytest.mark.soak
def test_engine_restart_gets_a_token_from_an_engine_that_was_killed(run):
    lines = run("benchmarks/engine_restart.py").stdout.splitlines()
    (row,) = next(json.loads(line)["rows"] for line in lines if line.startswith("{"))
    assert 0 < row["ready_s"] < row["first_token_s"]


@pytest.mark.soak
def test_embedding_cache_measures_first_and_known_pictures(run):
    assert last_line(run("benchmarks/embedding_cache.py"))


@pytest.mark.soak
def test_short_prompts_are_answered_by_both_recipes(run):
    (row,) = last_line(run("benchmarks/short_prompts.py"))["rows"]
    assert row["aggregated_ms"] > 0 and row["disaggregated_ms"] > 0


@pytest.mark.soak
def test_the_planner_s_days_end_with_their_figures(run):
    found = last_line(run("benchmarks/planner_days.py"))
    assert [row["way"] for row in found["rows"]] == ["planner", "dynamo", "fixed"]


def test_the_simulator_is_beside_a_deployment_and_a_gpu_s_figures(run):
    found = last_line(run("benchmarks/simulator_check.py"))
    (cell,) = found["cells"]
    assert cell["simulated"].keys() == cell["measured"].keys() == {"tokens_per_s", "ttft_p50_ms", "itl_p50_ms"}
    assert cell["simulated"]["itl_p50_ms"] > 40 and cell["measured"]["itl_p50_ms"] > 40
    assert found["hop_ms"] >= 0 and len(found["gpu"]) == 2


@pytest.mark.soak
def test_step_records_tells_what_one_costs(run):
    found = last_line(run("benchmarks/step_records.py"))
    assert found["rows"][0]["recorded_us"] > 0 and found["sent_us"] > 0


@pytest.mark.soak
def test_structural_tags_are_measured_beside_answers_without_them(run):
    figures = next(line for line in run("benchmarks/structural_tags.py").stdout.splitlines() if line.startswith("{"))
    found = json.loads(figures)
    assert all(row["ttft_p50_ms"] > 0 < row["answer_p50_ms"] for row in found["served"].values())
    assert found["compile_s"] > 0 and found["sampler_us"].keys() == {"no guide", "free", "in a call"}


@pytest.mark.soak
def test_batch_beside_live_measures_both_turns_and_the_batch(run):
    *_, figures, aim = run("benchmarks/batch_beside_live.py").stdout.splitlines()
    (cell,) = json.loads(figures)["cells"]
    assert cell["alone"]["ttft_p50_ms"] > 0 and cell["beside"]["ttft_p50_ms"] > 0 and cell["lines_per_s_alone"] > 0
    assert aim.startswith("aim: TTFT beside a batch, mocker")


def test_frontend_measures_our_side(run):
    """ai-dynamo needs an environment of its own, which its first run downloads."""
    (cell,) = last_line(run("benchmarks/frontend.py"))["cells"]
    assert cell["contender"] == "bireme" and cell["requests_per_s"] > 0 and not cell["errors"]
