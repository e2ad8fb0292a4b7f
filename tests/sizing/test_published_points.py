"""Recipes against what NVIDIA published: every key is the same, or its difference stands in the file with a reason."""

import json
import shlex
import statistics
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bireme.config import CHECKOUT
from bireme.recipe_files import recipe_tree
from bireme.sizing import recipe_rules as rules
from bireme.sizing.aiconfigurator import TableTimings
from bireme.sizing.machines import GPUS
from bireme.sizing.model_shapes import shape_of
from bireme.sizing.recipe_plan import Wish, plan
from bireme.sizing.timings import PeakTimings, RankLayout
from tools import make_recipe

HERE = Path(__file__).parent
CONFIGS = json.loads((HERE / "model_configs.json").read_text())
PUBLISHED = yaml.safe_load((HERE / "published_points.yaml").read_text())
GOLDEN = HERE / "golden"
R1 = shape_of(CONFIGS["nvidia/DeepSeek-R1-FP4"], {}, "nvidia/DeepSeek-R1-FP4", "R1")
ROWS = [(name, *row) for name in ("without_drafts", "with_drafts") for row in PUBLISHED["sweep"][name]]


def made(arguments, folder):
    """Return what the recipe that was asked for says, its engine YAMLs merged in."""
    words = shlex.split(arguments)
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIGS[words[1]]))
    out = folder / "made"
    assert make_recipe.main([*words, "--config", str(config), "--out", str(out)]) == 0
    tree = recipe_tree(out, "")
    balancer = out / "eplb.yaml"
    if balancer.exists():
        tree["workers"]["decode"]["engine_config"]["moe_config"]["load_balancer"] = yaml.safe_load(balancer.read_text())
    return tree


def at(tree, key):
    for name in key.split("."):
        tree = (tree or {}).get(name)
    return tree


def of_worker(tree, worker, key):
    return at(tree, key) if worker == "recipe" else at(tree["workers"][worker]["engine_config"], key)


@pytest.mark.parametrize("point", PUBLISHED["points"], ids=lambda point: point["name"])
def test_each_published_key_is_made_or_its_difference_has_a_reason(point, tmp_path):
    tree, differs = made(point["asked"], tmp_path), dict(point["differs"])
    found = {}
    for worker, keys in point["published"].items():
        for key, published in keys.items():
            ours, name = of_worker(tree, worker, key), f"{worker}.{key}"
            if ours != published:
                found[name] = ours
    assert found == {name: ours for name, (ours, _) in differs.items()}
    assert all(len(why) > 5 for _, why in differs.values())


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_recipe_is_written_as_its_golden_files_are(name, tmp_path):
    """To write them anew, empty the folder: they are put there, and the test fails once."""
    (point,) = (point for point in PUBLISHED["points"] if point["name"] == name)
    made(point["asked"], tmp_path)
    written = {path.name: path.read_text().replace(str(tmp_path), ".") for path in (tmp_path / "made").iterdir()}
    golden = {path.name: path.read_text() for path in (GOLDEN / name).iterdir()}
    if not golden.keys() - {".keep"}:
        for file, text in written.items():
            (GOLDEN / name / file).write_text(text)
    assert written == golden


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row[1:4])) + f"-{row[4]}-{row[7]}")
def test_the_rules_give_each_row_of_the_published_sweep(row):
    _, _, _, ranks, batch, tokens, is_dp, fraction, drafts, slots, requests = row
    assert requests // (ranks if is_dp else 1) == batch
    drafted = rules.drafts(R1, batch, 0 if row[0] == "without_drafts" else None).value
    kind = rules.attention_dp(R1, "decode", ranks, requests * (drafted + 1)).value
    layout = RankLayout(ranks=ranks, attention_dp=kind, has_experts=True)
    backend = rules.moe_backend(R1, GPUS["gb200"], layout, "decode").value
    ours = rules.decode_tokens(batch, drafted).value
    found = (kind, rules.memory_fraction("decode", layout, ours).value, drafted)
    assert found == (is_dp, fraction, drafts)
    assert rules.expert_slots(R1, layout, backend, batch * (drafted + 1)).value == slots
    generous = {tuple(one[:3]): one[3] for one in PUBLISHED["sweep"]["differs"]["generous"]}
    assert ours == generous.get((ranks, batch, drafted), max(tokens, 256))


def wish_of(model, gpu, ranks, attention_dp, prompt, output, concurrency):
    return Wish(
        shape=shape_of(CONFIGS[model], {}, model, model), gpu=GPUS[gpu], nodes=1, gpus_per_node=ranks,
        lengths=rules.Lengths(prompt=prompt, output=output), concurrency=concurrency, mode="aggregated",
        decode_ranks=ranks, decode_workers=1, attention_dp=attention_dp,
    )  # fmt: skip


def throughput(wish, timings):
    """Return output tokens a second and GPU."""
    return plan(wish, timings).requests_per_s * wish.lengths.output / wish.decode_ranks


def test_estimated_throughput_is_within_a_factor_of_two_of_what_is_published():
    wishes = [(wish_of(*row[:-1]), row[-1]) for row in PUBLISHED["throughput"]]
    ratios = [
        throughput(wish, PeakTimings(wish.shape, wish.gpu, wish.value_bytes)) / published for wish, published in wishes
    ]
    assert min(ratios) > 0.6 and max(ratios) < 2.1
    assert 0.8 < statistics.median(ratios) < 1.3


@pytest.mark.soak
def test_throughput_by_the_library_s_tables_is_near_what_is_published(tmp_path):
    """Installs aiconfigurator-core (82 MB, and what it needs) into an environment of its own."""
    (pin,) = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "aiconfigurator"
    ]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "own")], check=True)
    python = str(tmp_path / "own" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", pin], check=True)
    ratios, config = [], tmp_path / "config.json"
    for *asked, published in PUBLISHED["throughput"]:
        config.write_text(json.dumps(CONFIGS[asked[0]]))
        wish = wish_of(*asked)
        with TableTimings(wish, python, config) as timings:
            ratios.append(throughput(wish, timings) / published)
    assert min(ratios) > 0.6 and max(ratios) < 1.4
    assert 0.85 < statistics.median(ratios) < 1.15


@pytest.mark.parametrize(
    ("ranks", "is_dp", "backend", "strategy"),
    [
        (4, False, "TRTLLM", None),
        (8, False, "TRTLLM", "MNNVL"),
        (8, True, "CUTLASS", None),
        (16, True, "CUTEDSL", None),
    ],
)
def test_kernels_and_exchanges_follow_size_and_attention(ranks, is_dp, backend, strategy):
    layout = RankLayout(ranks=ranks, attention_dp=is_dp, has_experts=True)
    assert rules.moe_backend(R1, GPUS["gb200"], layout, "decode").value == backend
    assert rules.allreduce_strategy(GPUS["gb200"], layout, 4).value == strategy


def test_on_hopper_experts_run_on_hopper_s_kernels():
    layout = RankLayout(ranks=16, attention_dp=True, has_experts=True)
    mxfp4 = replace(R1, weights="mxfp4")
    assert rules.moe_backend(replace(R1, weights="fp8_blocks"), GPUS["h200"], layout, "decode").value == "CUTLASS"
    assert rules.moe_backend(mxfp4, GPUS["h200"], layout, "decode").value == "TRITON"
    assert rules.expert_slots(mxfp4, layout, "TRITON", 4096).value == 0  # TensorRT-LLM balances none there


def test_an_aggregated_step_holds_what_the_published_formula_says():
    lengths = rules.Lengths(prompt=8150, output=1024)
    assert rules.aggregated_tokens(1024, 0, lengths).value == 9344
