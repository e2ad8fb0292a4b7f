"""What a sweep on two GPUs has measured beside what is advised from a table of one: told by aims."""

import json

import pytest

from benchmarks import advice_against_sweep as program
from bireme.sizing.figures import Figures
from tools.sweeping.matrix import make_plan
from tools.sweeping.results import Results, Run

TREE = {
    "deployments": [
        {"recipe": "recipes/mocker", "workers": ["2"]},
        {"recipe": "recipes/mocker-disagg", "workers": ["1:1"]},
    ],
    "lengths": ["4000/16"], "rates": [0.2, 8.0], "loads": ["bireme"], "ttft_ms": 1000.0, "itl_ms": 100.0,
}  # fmt: skip
OPTIONS = ("--times", "tiny-chat-cpu")


def swept(folder, is_held, **changes):
    """A sweep that has measured all cells: `is_held` of kind and rate says whether TTFT kept its target."""
    results, plan = Results(folder), make_plan(TREE | changes, "a test")
    results.begin(plan)
    kinds = {one.name: one for one in plan.deployments}
    for cell in plan.cells:
        deployment = kinds[cell.deployment]
        ttft = 50.0 if is_held(deployment.kind, cell.rate) else 5000.0
        figures = Figures(
            requests=60, failed=0, seconds=60, input_tokens=64, output_tokens=16, tokens_per_s=16,
            tokens_per_s_per_user=50, tokens_per_s_per_user_p50=50, ttft_p50_ms=ttft, ttft_p90_ms=ttft,
            ttft_p99_ms=ttft, itl_p50_ms=20, itl_p90_ms=20, itl_p99_ms=20, latency_p50_ms=400,
        )  # fmt: skip
        results.save(Run(cell=cell, deployment=deployment, state="measured", figures=figures))
    return str(folder)


@pytest.mark.parametrize("is_like_the_table", [True, False])
def test_aims_say_whether_measured_and_advised_agree(tmp_path, capsys, is_like_the_table):
    folder = swept(tmp_path / "two", lambda kind, rate: rate < 1 or (not is_like_the_table and kind == "disaggregated"))
    assert program.main([folder, *OPTIONS]) == 0
    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [row["advised_held"] for row in rows] == [True, False, True, False]
    wanted = "equal" if is_like_the_table else "disaggregated"
    word = "ok" if is_like_the_table else "BELOW"
    assert f"better on two GPUs {wanted}, advised equal, the same asked for: {word}" in out


def test_a_sweep_without_a_target_or_of_one_way_is_refused(tmp_path, capsys):
    assert program.main([swept(tmp_path / "a", lambda kind, rate: True, ttft_ms=0.0), *OPTIONS]) == 2
    assert "a sweep without a target" in capsys.readouterr().err
    one = TREE["deployments"][:1]
    assert program.main([swept(tmp_path / "b", lambda kind, rate: True, deployments=one), *OPTIONS]) == 2
    assert "both ways are needed" in capsys.readouterr().err


@pytest.mark.parametrize(("others", "wanted"), [(8.0, "too close to call"), (2.0, "disaggregated")])
def test_what_hangs_on_the_error_of_the_table_is_no_advice(others, wanted):
    def row(kind, rate, advised, surely, perhaps):
        held = {"advised_held": advised, "surely_held": surely, "perhaps_held": perhaps}
        return {"kind": kind, "rate": rate} | held

    rows = [
        row("aggregated", 2.0, True, True, True),
        row("aggregated", others, others < 8, others < 8, True),
        row("disaggregated", 8.0, True, True, True),
    ]
    assert program.advised_better(rows) == wanted
