"""tools/advise.py: answers from a trace, recipes to choose from and to write to, and what it refuses."""

import json
import shutil
from dataclasses import replace

import pytest

from bireme.config import CHECKOUT
from bireme.sizing import recipe_constants
from bireme.sizing.advice import Layout, LayoutChoice, LayoutFigures, Range, Reason
from tools import advise

TARGET = ["--ttft-ms", "500", "--itl-ms", "60", "--times", "tiny-chat-cpu"]
QUESTION = advise.Question(advise.ServiceTarget(500, 60))
SMALL = [*TARGET, "--gpus", "2", "--requests", "10", "--draws", "1"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "day.jsonl"
    rows = [
        {"timestamp": 5000 * number, "input_length": 600, "output_length": 5, "hash_ids": [number, number + 100]}
        for number in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def advised(capsys, *arguments):
    """Return the exit code, stdout and the JSON document."""
    code = advise.main([*arguments, "--json"])
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1])


def test_a_trace_is_answered_for(capsys, trace):
    code, out, document = advised(capsys, trace, *SMALL)
    assert code == advise.HELD and document["held"] and not document["disaggregation_pays"]
    assert out.startswith("1 aggregated worker holds the target")
    assert "the busiest 13 of 30" in out and set(document["changes"]) == set(advise.advice.neighbors(QUESTION))
    assert document["choice"]["best"]["layout"] == {"prefill": 0, "decode": 1}
    assert document["expected"]["ttft_p50_ms"]["low"] < document["expected"]["ttft_p50_ms"]["high"]


def test_a_target_that_nothing_holds_is_said_so(capsys, trace):
    code, out, document = advised(capsys, trace, *SMALL, "--itl-ms", "0.1")
    assert code == advise.LOST and not document["held"]
    assert out.startswith("No layout of up to 2 GPUs holds the target")


def test_recipes_are_chosen_from_and_the_measured_prices_written(capsys, trace, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(CHECKOUT / "recipes/tiny-chat-disagg", folder)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("router: {transfer_ms: 0}", "router: {prefill_weight: 1.5}"))
    both = ["--recipe", str(folder), "--recipe", "recipes/tiny-chat"]
    code, out, document = advised(capsys, trace, *SMALL, *both, "--write", "--hop-ms", "3")
    assert code == advise.HELD and document["recipe"] == "recipes/tiny-chat"
    price = document["constants"]["prefill_ms_per_token"]
    assert f"router.prefill_ms_per_token: unset -> {price:g}" in out
    assert "recipes/tiny-chat: nothing to set" in out
    text = recipe.read_text()
    assert f"router: {{prefill_ms_per_token: {price:g}, prefill_weight: 1.5}}  # short prompts" in text
    assert "transfer_ms" not in text  # what is assumed is not measured
    assert f"{folder}: warning: neither tools/make_recipe.py nor this program has made it" in out
    assert text.startswith("# Router's prices: measured, by tools/advise.py from tiny-chat-cpu\n")
    assert recipe_constants.is_made(folder)


def test_without_a_table_a_trace_that_tells_no_times_is_refused(capsys, trace):
    assert advise.main([trace, "--ttft-ms", "500", "--itl-ms", "60"]) == advise.WRONG
    assert "0 answers that no prompt disturbed, 20 are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--isl", "100", "--rate", "1"], "--osl: needed without a trace"),
        (["TRACE", "--rate", "1"], "--rate: a trace has its own"),
        (["--isl", "100", "--osl", "5", "--rate", "1", "--prefix", "200"], "--prefix 200: shorter than --isl 100"),
        (["TRACE", "--write"], "--write: needs --recipe"),
        (["TRACE", "--times", "nothing.json"], "nothing.json: No such file"),
        (["TRACE", "--recipe", "recipes/nothing"], "recipes/nothing"),
        (["nothing.jsonl"], "nothing.jsonl"),
        (["TRACE", "--metrics", "page.txt"], "a trace, --metrics, --prometheus: one of them"),
        (["--metrics", "nothing.txt"], "nothing.txt"),
        (["TRACE", "--save-times", "t.json"], "--save-times: keeps what is fitted"),
        (["TRACE", "--seconds", "1e-9"], "--seconds 1e-09: over before there is an answer"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(capsys, trace, arguments, message):
    given = [trace if one == "TRACE" else one for one in arguments]
    assert advise.main([*SMALL, *given]) == advise.WRONG
    assert message in capsys.readouterr().err


def test_a_verdict_within_the_error_of_the_step_times_says_what_decides_it():
    row = LayoutFigures(Layout(0, 2), 10, 70, 90, 8, 10, 10, 1.0, 2000, True)
    rates = {"aggregated": Range(10, 11), "apart": Range(10, 12)}
    choice = LayoutChoice(row, replace(row, layout=Layout(1, 1)), rates, Range(0.9, 1.1), Reason.CLOSE)
    said = advise.pays(choice, 0.014)
    assert "too close to call, step times are told within 1.4%" in said and "aggregated has fewer parts" in said
    assert "tools/sweep.py" in said and "prefill apart is named" in advise.pays(replace(choice, best=choice.other), 0.1)
