"""tools/sweep.py: the plan of a matrix, what loads export, a launch that fails, and a sweep of real launches."""

import json
import re
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from bireme.config import CHECKOUT
from bireme.errors import ConfigError
from bireme.launch.processes import is_alive
from bireme.recipe_files import load_recipe
from bireme.sizing.figures import Figures
from tools import sweep
from tools.sweeping import gpus, launch, loads, report
from tools.sweeping.launch import LaunchFailedError, Stop, StoppedError, Wait, run_load
from tools.sweeping.loads import LoadFailedError, Target
from tools.sweeping.matrix import Cell, make_plan, read_matrix
from tools.sweeping.results import Results, Run
from tools.sweeping.runner import Estimate

MOCKER = {"recipe": "recipes/mocker"}
DISAGGREGATED = {"recipe": "recipes/mocker-disagg"}


def plan_of(*deployments, **more):
    return make_plan({"deployments": list(deployments), "concurrency": [1], **more}, "options")


def cell(**more):
    fields = {"input_tokens": 64, "output_tokens": 16, "concurrency": 4, "requests": 40, "warmup": 8, "seed": 1}
    return Cell(**{"deployment": "mocker", "load": "aiperf", **fields, **more})


def figures(**more):
    numbers = dict.fromkeys(Figures.__struct_fields__, 10.0) | {"requests": 40, "failed": 0}
    return Figures(**{**numbers, **more})


# The plan


def test_a_matrix_is_every_deployment_under_every_length_and_load_with_prompts_of_its_own():
    plan = plan_of(MOCKER, DISAGGREGATED, lengths=["64/16", "128/8"], concurrency=[1, 4], rates=[2.5], rate_seconds=10)
    assert len(plan.cells) == 2 * 2 * 3 * 2
    assert len({one.seed for one in plan.cells}) == len({one.slug for one in plan.cells}) == 24
    assert [one.kind for one in plan.deployments] == ["aggregated", "disaggregated"]
    assert [(one.pressure, one.requests, one.warmup) for one in plan.cells[:6:2]] == [
        ("1 under way", 10, 2), ("4 under way", 40, 8), ("2.5 requests/s", 25, 2),
    ]  # fmt: skip


def test_what_varies_and_how_many_workers_make_deployments_with_names_of_their_own():
    vary = {"workers.decode.engine_config.max_batch_size": [8, 16]}
    plan = plan_of(MOCKER | {"vary": vary, "workers": ["2", "1:1"]}, DISAGGREGATED | {"workers": ["2", "1:2"]})
    assert [one.name for one in plan.deployments] == [
        "mocker, decode max_batch_size=8 2", "mocker, decode max_batch_size=16 2", "mocker-disagg 1:2",
    ]  # fmt: skip
    assert plan.deployments[-1].workers == {"prefill": 1, "decode": 2}
    assert plan.deployments[0].settings[-1] == "workers.decode.replicas=2"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"lengths": ["64-16"]}, r"lengths: '64-16'; write PROMPT/ANSWER in tokens, as in 1024/128"),
        ({"lengths": ["64/1"]}, r"a measured answer 2 or more"),
        ({"concurrency": []}, r"neither concurrency nor rates; give one"),
        ({"concurrency": [0]}, r"concurrency.*1 or more"),
        ({"rates": [-1.0]}, r"rates.*more than 0"),
        ({"loads": ["wrk"]}, r"loads.*one of aiperf, bireme"),
        ({"loads": []}, r"loads: empty; give aiperf, bireme or both"),
        ({"lengths": []}, r"lengths: empty; give PROMPT/ANSWER"),
        ({"concurrency": [1, 4, 1]}, r"concurrency: 1 twice; leave one out, or give `repeats`"),
        ({"deployments": [MOCKER | {"vary": {"model": []}}]}, r"deployments.0..vary.model: empty; give its values"),
        ({"deployments": [MOCKER | {"workers": [2]}]}, r'workers: 2; write it in quotes, as in "2" or "1:2"'),
        ({"lenghts": ["64/16"]}, r"lenghts.*lengths"),
        ({"deployments": []}, r"no recipe; name at least one"),
        ({"deployments": [{"recipe": "recipes/moker"}]}, r"no recipe at recipes/moker.*did you mean recipes/mocker"),
        ({"deployments": [MOCKER | {"set": {"workers.decode.replica": 2}}]}, r"workers.decode.*replicas"),
        ({"deployments": [MOCKER, MOCKER]}, r"two deployments would be called 'mocker'; give each a `name`"),
        ({"deployments": [MOCKER | {"workers": ["1:1"]}]}, r"mocker is aggregated: none of its workers is a number"),
        ({"deployments": [MOCKER | {"workers": ["two"]}]}, r"workers: 'two'; write 2 .* 1:2 for prefill:decode"),
        ({"deployments": [{"recipe": "recipes/tiny-video"}]}, r"no decode workers"),
        ({"concurrency": list(range(1, 1002))}, r"2002 cells; at most 2000, split the sweep"),
    ],
)
def test_a_matrix_that_is_wrong_is_refused_before_anything_starts(more, told):
    tree = {"deployments": [MOCKER], "concurrency": [1], **more}
    with pytest.raises(ConfigError, match=told):
        make_plan(tree, "options")


def test_the_command_line_says_over_the_file_what_is_swept(tmp_path):
    (tmp_path / "matrix.yaml").write_text("deployments: [{recipe: recipes/mocker}]\nconcurrency: [9]\nseed: 5\n")
    options = sweep.parse(["--matrix", str(tmp_path / "matrix.yaml"), "--concurrency", "1,2", "--rate-seconds", "3"])
    plan = make_plan(sweep.tree_of(options), "matrix.yaml")
    assert (plan.matrix.concurrency, plan.matrix.seed, plan.matrix.rate_seconds) == ((1, 2), 5, 3.0)


def test_the_matrix_that_the_page_shows_is_a_plan(tmp_path):
    (shown,) = re.findall(r"```yaml\n(deployments:.*?)```", (CHECKOUT / "docs" / "sizing.md").read_text(), re.DOTALL)
    (tmp_path / "matrix.yaml").write_text(shown)
    plan = make_plan(read_matrix(str(tmp_path / "matrix.yaml")), "docs/sizing.md")
    assert len(plan.deployments) == 4 and len(plan.cells) == 4 * 2 * 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["recipes/mocker", "--concurrency", "1,x"], "--concurrency: 'x' is no int"),
        (["recipes/mocker", "--concurrency", "1", "--set", "replicas"], "--set replicas: write KEY=VALUE"),
        (["--concurrency", "1", "--workers", "2"], "are of recipes on the command line"),
        (["--matrix", "nowhere.yaml"], "--matrix nowhere.yaml: can't be read"),
        (["--resume", "nowhere"], "--resume nowhere: no plan.json there"),
    ],
)
def test_an_option_that_is_wrong_names_itself(arguments, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sweep.main(arguments) == sweep.WRONG
    assert told in capsys.readouterr().err


def test_a_plan_is_shown_with_its_minutes_and_nothing_is_made(capsys, tmp_path):
    arguments = ["recipes/mocker", "--lengths", "64/50", "--concurrency", "1,4", "--loads", "bireme", "--plan"]
    assert sweep.main([*arguments, "--out", str(tmp_path / "out")]) == sweep.GOOD
    told = capsys.readouterr().out
    assert (
        "mocker: aggregated, 2 cells" in told and "2 cells by bireme; about 0.8 min where a token takes 20 ms" in told
    )
    assert not (tmp_path / "out").exists()


def test_an_estimate_follows_what_has_been_measured():
    one = cell(load="bireme", output_tokens=50)  # 12 rounds of a second, 2 s of its own
    estimate = Estimate(itl_ms=20.0)
    assert estimate.minutes([one]) == pytest.approx((14 + 20) / 60)
    estimate.saw_cell(one, 28.0)
    estimate.saw_launch(32.0)
    assert estimate.minutes([one]) == pytest.approx(1.0)


# Loads


def test_aiperf_gets_a_prompt_for_each_request_and_answers_of_exactly_this_length(tmp_path):
    command = loads.command(cell(), Target("http://127.0.0.1:1", "mocker", "models/tiny-llama"), tmp_path)
    told = " ".join(command)
    for part in (
        "--num-dataset-entries 48", "--request-count 40", "--warmup-request-count 8", "--concurrency 4", "--osl 16",
        "min_tokens:16", "ignore_eos:true", "--use-server-token-count",
    ):  # fmt: skip
        assert part in told
    at_rate = " ".join(loads.command(cell(concurrency=0, rate=2.5, warmup=0), Target("u", "m", "t"), tmp_path))
    assert "--request-rate 2.5 --arrival-pattern poisson" in at_rate
    assert "--concurrency" not in at_rate and "warmup" not in at_rate


EXPORT = {
    "aiperf_version": "0.13.0", "is_complete": True, "was_cancelled": False, "error_summary": [],
    "request_count": {"avg": 40.0}, "benchmark_duration": {"avg": 1.99}, "input_sequence_length": {"avg": 138.0},
    "output_sequence_length": {"avg": 32.0}, "output_token_throughput": {"avg": 640.5},
    "output_token_throughput_per_user": {"avg": 203.8, "p50": 200.2},
    "time_to_first_token": {"p50": 30.5, "p90": 49.2, "p99": 51.1},
    "inter_token_latency": {"p50": 5.0, "p90": 5.2, "p99": 5.4}, "request_latency": {"p50": 183.0},
}  # fmt: skip


def test_aiperf_s_export_is_read_back(tmp_path):
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(EXPORT))
    found, tool = loads.read(cell(), tmp_path, "")
    assert (tool, found.requests, found.tokens_per_s, found.tokens_per_s_per_user_p50) == (
        "aiperf 0.13.0", 40, 640.5, 200.2,
    )  # fmt: skip
    assert (found.ttft_p99_ms, found.itl_p50_ms, found.latency_p50_ms) == (51.1, 5.0, 183.0)


def test_answers_that_aiperf_saw_come_at_one_time_have_no_speed(tmp_path):
    burst = {"inter_token_latency": {"p50": 0.03, "p90": 1.0, "p99": 2.0}}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(EXPORT | burst))
    found, _ = loads.read(cell(), tmp_path, "")
    assert (found.tokens_per_s_per_user_p50, found.itl_p90_ms, found.tokens_per_s) == (None, None, 640.5)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"was_cancelled": True}, "cancelled before its end"),
        ({"is_complete": False}, "cancelled before its end"),
        ({"error_summary": [{"code": 503, "count": 2}]}, "aiperf met errors:.*503"),
        ({"request_latency": {}}, r"no request_latency.p50 \(None\)"),
        ({"benchmark_duration": {"avg": float("nan")}}, r"no benchmark_duration.avg \(nan\)"),
        ({"request_count": {"avg": 12.0}}, "12 of 40 requests were answered"),
    ],
)
def test_an_export_that_is_not_whole_is_a_failure_with_its_reason(more, told, tmp_path):
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(EXPORT | more))
    with pytest.raises(LoadFailedError, match=told):
        loads.read(cell(), tmp_path, "")


@pytest.mark.parametrize(
    ("stdout", "told"),
    [
        ("", "told nothing that can be read"),
        ('{"figures": null, "errors": ["HTTP 400: too long"]}', "no request was answered: HTTP 400: too long"),
        ("Traceback", "told nothing that can be read"),
    ],
)
def test_our_load_s_failure_has_its_reason_too(stdout, told, tmp_path):
    with pytest.raises(LoadFailedError, match=told):
        loads.read(cell(load="bireme"), tmp_path, stdout)


def test_requests_that_aiperf_saw_fail_are_the_reason(tmp_path):
    assert loads.request_errors(tmp_path) == ""
    records = [{"error": {"code": 400, "message": "too long"}}, {"error": None}, {"error": {"code": 503}}, {}]
    lines = [json.dumps(record) for record in [*records, records[0]]]
    (tmp_path / "profile_export.jsonl").write_text("\n".join([*lines, "{half"]))
    assert loads.request_errors(tmp_path) == "requests failed with 400: too long"


def test_without_an_export_it_is_said_which_file_is_missing(tmp_path):
    with pytest.raises(LoadFailedError, match="aiperf left no profile_export_aiperf.json"):
        loads.read(cell(), tmp_path, "")


def test_a_load_that_hangs_is_ended_with_its_children(tmp_path):
    script = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    log = tmp_path / "load.log"

    def has_begun():
        return bool(log.with_suffix(".out").read_text().strip())

    stop = Stop()
    wait = Wait(stop, "a cell", lambda text: None)
    with pytest.raises(LaunchFailedError):  # the launch `dies` once the child is there
        run_load([sys.executable, "-c", script], log, 600, has_begun, wait)
    child = int(log.with_suffix(".out").read_text())
    while is_alive(child):
        time.sleep(0.01)
    with pytest.raises(TimeoutError, match="had not ended after 0 s; give more with cell_timeout_s"):
        run_load([sys.executable, "-c", script], log, 0, lambda: False, wait)
    stop.set()
    with pytest.raises(StoppedError):
        run_load([sys.executable, "-c", script], log, 600, lambda: False, wait)


def test_a_matrix_that_is_nested_for_ever_is_refused(tmp_path):
    (tmp_path / "matrix.yaml").write_text("[" * 1_000)
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_matrix(str(tmp_path / "matrix.yaml"))


def ends(pid):
    deadline = time.monotonic() + 60
    while (lives := is_alive(pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not lives


def test_a_load_leaves_no_children_when_it_ends(tmp_path):
    script = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    wait = Wait(Stop(), "a cell", lambda text: None)
    child = int(run_load([sys.executable, "-c", script], tmp_path / "load.log", 600, lambda: False, wait))
    assert ends(child)


def test_a_load_dies_with_the_sweep(tmp_path):
    log = tmp_path / "load.log"
    script = (
        "import sys; from pathlib import Path; from tools.sweeping.launch import Stop, Wait, run_load\n"
        "load = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        f"run_load([sys.executable, '-c', load], Path({str(log)!r}), 600, lambda: False, Wait(Stop(), '', print))"
    )
    sweep = subprocess.Popen([sys.executable, "-c", script], cwd=CHECKOUT)
    output = log.with_suffix(".out")
    try:
        while not (output.exists() and output.read_text().endswith("\n")):
            assert sweep.poll() is None
            time.sleep(0.01)
    finally:
        sweep.kill()
        sweep.wait()
    assert ends(int(output.read_text()))


def test_a_load_that_fails_tells_the_end_of_what_it_said(tmp_path):
    code = "import sys; print('ValueError: error: no such model', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ChildProcessError, match="ended with 3: ValueError: error: no such model"):
        run_load(
            [sys.executable, "-c", code],
            tmp_path / "load.log",
            600,
            lambda: False,
            Wait(Stop(), "a cell", lambda text: None),
        )


def test_a_long_wait_says_now_and_then_that_it_goes_on(monkeypatch):
    monkeypatch.setattr(launch, "_TELL_S", 0.0)
    told = []
    Wait(Stop(), "a cell", told.append).pause()
    assert told == ["a cell: 0 s so far"]


# GPUs


def document(devices, num_gpus, variables=None):
    machine = {"gpus": [{}] * num_gpus} if num_gpus else {}
    workers = {name: {"devices": found} for name, found in devices.items()}
    return {"machine": machine, "environment": variables or {}, "settled": {"workers": workers}}


def test_gpus_are_those_that_a_launch_s_engines_use():
    recipe = load_recipe("recipes/tiny-chat-disagg", '{"workers": {"decode": {"replicas": 2}}}')
    workers = ("prefill", "decode", "decode_1")
    apart = document(dict(zip(workers, ([0], [1], [2]), strict=True)), 4)
    assert gpus.share_of(apart, recipe) == gpus.Share(3, "GPU")
    assert gpus.share_of(document(dict.fromkeys(workers, "all"), 4), recipe) == gpus.Share(1, "GPU")
    assert gpus.share_of(document(dict.fromkeys(workers, "all"), 0), recipe) == gpus.Share(3, "worker")
    hidden = document(dict.fromkeys(workers, "all"), 4, {"CUDA_VISIBLE_DEVICES": ""})
    assert gpus.share_of(hidden, recipe) == gpus.Share(3, "worker")


def test_workers_that_were_asked_for_get_gpus_of_their_own():
    override = '{"workers": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}}'
    recipe = load_recipe("recipes/tiny-chat-disagg", override)
    assert gpus.placement(recipe, 4) == ("workers.prefill.devices=[0]", "workers.decode.devices=[1, 2]")
    assert gpus.placement(recipe, 0) == ()
    assert gpus.placement(load_recipe("recipes/mocker", ""), 4) == ()
    with pytest.raises(ConfigError, match="its workers take 3 GPUs, this machine has 2; ask for fewer"):
        gpus.placement(recipe, 2)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a program of this name on PATH; it keeps what it was asked for."""

    def install(locking):
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\necho "$1" >> {tmp_path}/asked\n'
            f"case $1 in --lock*) {locking};; --query-gpu=index) echo 0; echo 1;;"
            " --query*) echo 1980; echo 1980;; esac\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "asked"

    return install


def test_clocks_are_locked_where_that_is_allowed_and_freed_again(nvidia_smi):
    asked = nvidia_smi("exit 0")
    clocks = gpus.Clocks(1500)
    clocks.lock()
    assert (clocks.told, gpus.num_gpus()) == ("locked to 1500 MHz", 2)
    clocks.unlock()
    clocks.unlock()
    assert asked.read_text().split() == ["--lock-gpu-clocks=1500,1500", "--query-gpu=index", "--reset-gpu-clocks"]


def test_clocks_that_may_not_be_locked_are_told(nvidia_smi):
    asked = nvidia_smi("echo 'no permission to lock'; exit 4")
    clocks = gpus.Clocks(1500)
    clocks.lock()
    clocks.unlock()
    assert clocks.told == "not set, no permission to lock" and "--reset" not in asked.read_text()


def test_clocks_that_nobody_asked_for_are_only_read(nvidia_smi):
    asked = nvidia_smi("exit 0")
    clocks = gpus.Clocks(0)
    clocks.lock()
    clocks.unlock()
    assert clocks.told == "as they were: 1980, 1980 MHz" and asked.read_text() == "--query-gpu=clocks.sm\n"


# Results and report


def runs_of(plan):
    """Return runs with made-up figures; the last has failed."""
    made = []
    for number, one in enumerate(plan.cells):
        deployment = next(found for found in plan.deployments if found.name == one.deployment)
        is_apart = deployment.kind == "disaggregated"
        rate = 100.0 + 10 * number + 50 * is_apart
        made.append(Run(
            cell=one, deployment=deployment, state="measured", tool=one.load, share=gpus.Share(1 + is_apart, "worker"),
            figures=figures(tokens_per_s=rate, tokens_per_s_per_user_p50=50.0 - number),
            tokens_per_s_per_gpu=rate / (1 + is_apart),
        ))  # fmt: skip
    failed = msgspec.structs.replace(
        made[-1], state="failed", reason="launch: <no room>", figures=None, tokens_per_s_per_gpu=None
    )
    return [*made[:-1], failed]


def test_a_folder_goes_on_with_what_is_not_measured(tmp_path):
    plan, results = plan_of(MOCKER, DISAGGREGATED), Results(tmp_path / "out")
    results.begin(plan)
    runs = runs_of(plan)
    for run in runs[1:]:
        results.save(run)
    again = Results(tmp_path / "out")
    assert again.plan() == plan
    assert again.left(plan) == [plan.cells[0], plan.cells[-1]]  # not begun, failed
    assert again.read_all(plan) == runs[1:]
    with pytest.raises(ConfigError, match=r"a sweep is there; --resume .* goes on with it"):
        again.check_new()
    (tmp_path / "out" / "runs" / f"{plan.cells[1].slug}.json").write_text("{broken")
    assert plan.cells[1] in again.left(plan)


def test_a_run_of_another_matrix_does_not_count_and_is_not_written_over(tmp_path):
    results, old = Results(tmp_path), plan_of(MOCKER, loads=["bireme"])
    results.begin(old)
    results.save(msgspec.structs.replace(runs_of(old)[0], state="measured"))
    assert not results.left(old)
    longer = plan_of(MOCKER, loads=["bireme"], requests_per_stream=50)
    assert results.left(longer) == longer.cells and results.read_all(longer) == []
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ConfigError, match="runs of another sweep are there; name another folder"):
        Results(tmp_path).check_new()


def test_two_sweeps_do_not_measure_into_one_folder(tmp_path):
    first, second = Results(tmp_path), Results(tmp_path)
    first.begin(plan_of(MOCKER))
    with pytest.raises(ConfigError, match="another sweep measures into it"):
        second.claim()


def test_what_an_earlier_try_has_exported_is_gone_before_the_next(tmp_path):
    results = Results(tmp_path)
    (results.new_load_folder(cell()) / "profile_export_aiperf.json").write_text("{}")
    assert list(results.new_load_folder(cell()).iterdir()) == []


def test_a_plan_of_another_version_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text('{"format": "bireme.sweep_plan.v0"}')
    with pytest.raises(ConfigError, match="not a plan of this version"):
        Results(tmp_path).plan()


def test_a_report_compares_both_ways_and_shows_every_cell_and_why_one_has_failed(tmp_path):
    plan = plan_of(MOCKER, DISAGGREGATED, lengths=["64/16", "1024/8"], concurrency=[1, 4])
    runs = runs_of(plan)
    path, no_picture = report.write_report(tmp_path, plan, runs, ["Machine: one."])
    html = path.read_text()
    assert no_picture == "" and (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert html.count("<svg") == 4 and "launch: &lt;no room&gt;" in html and "Machine: one." in html
    assert "[aiperf] Up to" in html and "aggregated is better" in html
    assert re.search(r"aiperf saw 0.91 to 0.9\d times the tokens/s that bireme&#39;s load saw, over 7 cells", html)
    assert f"{len(runs) - 1} of {len(runs)} cells measured, 1 failed, 0 not begun" in html


def test_a_report_of_one_way_says_what_is_missing_for_a_comparison():
    plan = plan_of(MOCKER)
    (told, _) = report.comparison(plan, runs_of(plan)[:1] * 2, "512/128") + [""]
    assert told == "[aiperf] Nothing disaggregated is in this sweep; name such a recipe as well to have both compared."


def test_a_way_that_is_not_measured_yet_is_not_said_to_be_missing():
    plan = plan_of(MOCKER, DISAGGREGATED, loads=["bireme"])
    (told,) = report.comparison(plan, runs_of(plan)[:1], "512/128")
    assert told == "[bireme] Nothing disaggregated is measured yet, so there is nothing to compare."


def test_a_report_tells_what_was_measured_in_which_go_and_which_speeds_nobody_knows():
    plan = plan_of(MOCKER, concurrency=[1, 4, 8], loads=["bireme"])
    unknown = figures(tokens_per_s_per_user_p50=None)
    runs = [
        msgspec.structs.replace(run, state="measured", figures=unknown if at else figures(), sweep_began_at=began_at)
        for at, (run, began_at) in enumerate(
            zip(runs_of(plan), ["2026-11-28T01:56:05+00:00"] * 2 + ["2026-11-28T03:01:00+00:00"], strict=True)
        )
    ]
    told = " ".join(report.lead_of(plan, runs, "GPU"))
    assert "2 goes, as it was resumed: 2 cells from 2026-11-28 01:56 on, 1 cell from 2026-11-28 03:01 on" in told
    assert "2 cells are on no front" in told
    assert "goes" not in " ".join(report.lead_of(plan, runs[:2], "GPU"))


def test_repeats_come_in_turns_and_what_they_differ_by_counts_as_equal():
    plan = plan_of(MOCKER, DISAGGREGATED, concurrency=[1, 4], repeats=2, loads=["bireme"])
    assert [(one.concurrency, one.repeat) for one in plan.cells[:4]] == [(1, 1), (4, 1), (1, 2), (4, 2)]
    rates = {("mocker", 1): 100.0, ("mocker", 2): 120.0, ("mocker-disagg", 1): 220.0, ("mocker-disagg", 2): 240.0}
    runs = [
        msgspec.structs.replace(
            run, state="measured", figures=figures(tokens_per_s=rate), tokens_per_s_per_gpu=rate / run.share.count
        )
        for run in runs_of(plan)
        for rate in [rates[run.cell.deployment, run.cell.repeat]]
    ]
    assert [point.per_gpu for point in report.points_of(runs)] == [110.0, 110.0, 115.0, 115.0]
    assert report.trust(runs).startswith("Repeats of a cell differed by 20% in tokens/s at most")
    assert "are equal within 20%." in report.comparison(plan, runs, "512/128")[0]


def test_a_cell_that_was_measured_once_is_not_said_to_come_again():
    plan = plan_of(MOCKER, loads=["bireme"])
    assert "measured once, so nobody knows" in report.trust(runs_of(plan))


def test_cells_beyond_the_limits_do_not_count_for_the_fronts():
    plan = plan_of(MOCKER, DISAGGREGATED, loads=["bireme"], ttft_ms=50.0)
    slow, fast = (
        msgspec.structs.replace(run, state="measured", figures=figures(ttft_p90_ms=ttft), tokens_per_s_per_gpu=10.0)
        for run, ttft in zip(runs_of(plan), (50.1, 50.0), strict=True)
    )
    (told,) = report.comparison(plan, [slow, fast], "512/128")
    assert told == "[bireme] aggregated has no point that counts, so disaggregated can't be compared with it."
    assert report.lead_of(plan, [slow, fast], "GPU")[1] == (
        "Only cells with TTFT at p90 up to 50 ms count for the fronts: 1 of 2."
    )
    assert "are equal within 5%" in report.comparison(plan.changed(ttft_ms=0.0), [slow, fast], "512/128")[0]


def test_a_sweep_that_goes_on_takes_other_limits_and_no_other_cells(tmp_path, capsys):
    plan, results = plan_of(MOCKER, loads=["bireme"]), Results(tmp_path)
    results.begin(plan)
    _, found = sweep.opened(sweep.parse(["--resume", str(tmp_path), "--cell-timeout-s", "5", "--itl-ms", "9"]))
    assert (found.matrix.cell_timeout_s, found.matrix.itl_ms, found.cells) == (5.0, 9.0, plan.cells)
    with pytest.raises(SystemExit):
        sweep.parse(["--resume", str(tmp_path), "--seed", "5", "--loads", "bireme"])
    assert "leave out loads, seed" in capsys.readouterr().err
    assert sweep.main(["--resume", str(tmp_path), "--cell-timeout-s", "-1"]) == sweep.WRONG
    assert "cell_timeout_s: -1.0; more than 0" in capsys.readouterr().err


def test_ways_with_gpus_and_without_are_not_compared():
    plan = plan_of(MOCKER, DISAGGREGATED)
    runs = [msgspec.structs.replace(run, share=gpus.Share(1, unit)) for run, unit in zip(
        runs_of(plan), ("GPU", "GPU", "worker", "worker"), strict=True)]  # fmt: skip
    (told,) = report.comparison(plan, runs, "512/128")
    assert told.startswith("Some launches used GPUs and others none")


def test_a_report_of_failures_alone_has_no_picture(tmp_path):
    plan = plan_of(MOCKER, loads=["bireme"])
    _, no_picture = report.write_report(tmp_path, plan, runs_of(plan), [])
    assert no_picture == "nothing was measured that a picture could show"


# Real launches


@pytest.mark.server
def test_a_sweep_measures_what_comes_up_and_tells_why_the_rest_did_not(sample_model, tmp_path):
    """Two cells on the mocker in one launch, and a deployment that can't come up; then Ctrl-C while it is resumed."""
    sample_model("llama")
    (tmp_path / "matrix.yaml").write_text(
        "deployments:\n"
        "- {recipe: recipes/mocker, set: {workers.decode.engine_config.mocker.step_ms: 1}}\n"
        "- {recipe: recipes/mocker-disagg, set: {model: models/nowhere, tokenizer: models/tiny-llama}}\n"
        "loads: [bireme]\nlengths: [16/4]\nconcurrency: [1]\nrates: [50]\nrate_seconds: 0.2\nrequests_per_stream: 3\n"
    )
    out = tmp_path / "out"
    command = [sys.executable, "tools/sweep.py", "--matrix", str(tmp_path / "matrix.yaml"), "--out", str(out)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == sweep.FAILED, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["measured"], told["failed"], told["left"]) == (2, 2, 0), done.stderr
    results = Results(out)
    plan = results.plan()
    first, second, *failed = results.read_all(plan)
    assert (first.figures.requests, first.figures.input_tokens, first.figures.output_tokens) == (3, 16, 4)
    assert (second.figures.requests, second.share) == (10, gpus.Share(1, "worker"))
    assert all("launch: serve.py ended with" in run.reason and "nowhere" in run.reason for run in failed)
    assert "launch: serve.py ended with" in (out / "report.html").read_text()

    for run in (out / "runs").glob("mocker-disagg*"):
        run.unlink()
    (out / "runs" / f"{plan.cells[0].slug}.json").unlink()
    resumed = subprocess.Popen(
        [sys.executable, "tools/sweep.py", "--resume", str(out)],
        cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "starting" not in (line := resumed.stderr.readline()):
        assert line, "it has ended"
    resumed.send_signal(signal.SIGINT)
    stdout, stderr = resumed.communicate(timeout=400)
    assert resumed.returncode == sweep.STOPPED, stderr
    assert json.loads(stdout.splitlines()[-1])["measured"] == 1 and f"--resume {out} goes on" in stderr
