"""tools/make_recipe.py: what it writes can be checked and deployed, and what can't be is refused with the remedy."""

import contextlib
import json
import random
import re
import sys

import pytest
import yaml

from bireme.errors import ConfigError
from bireme.launch.recipe_check import check_folder
from bireme.recipe_files import load_recipe
from bireme.sizing.recipe_plan import plan
from tests.repository.house import CHECKOUT
from tools import make_manifests, make_recipe, make_sbatch, serve_nodes

CONFIGS = json.loads((CHECKOUT / "tests" / "sizing" / "model_configs.json").read_text())
NETWORK = ("--network", "10.0.0.0/8")
# Both stages of a recipe for nodes of their own: no devices are named, which on one machine would be a mistake.
ON_NODES_OF_THEIR_OWN = "prefill and decode both take the first GPUs of the machine"


@pytest.fixture
def config(tmp_path):
    def write(model, **changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(CONFIGS[model] | changes))
        return path

    return write


def asked(config, model, text, out):
    return make_recipe.main(["--model", model, "--config", str(config(model)), *text.split(), "--out", str(out)])


LLAMA, R1, GPT_OSS = "meta-llama/Llama-3.1-8B-Instruct", "nvidia/DeepSeek-R1-FP4", "openai/gpt-oss-120b"


def test_one_command_makes_a_recipe_whose_yaml_says_why(config, tmp_path, capsys):
    text = "--gpu h100 --gpus 8 --isl 2000 --osl 256 --ttft-ms 500 --itl-ms 25 --json"
    assert asked(config, LLAMA, text, tmp_path / "made") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["itl_ms"] <= 25 and told["ttft_ms"] <= 500 and told["gpus"] == 8
    decode = (tmp_path / "made" / "decode.yaml").read_text()
    settings = [line for line in decode.splitlines() if re.match(r" *\w+: \S", line)]
    with_reasons = [line for line in settings if "# " in line]
    assert len(with_reasons) >= len(settings) - 2
    assert "estimated from the H100's peaks" in (tmp_path / "made" / "README.md").read_text()
    assert check_folder(tmp_path / "made") == []


def test_a_folder_s_weights_count_as_they_are(tmp_path, capsys):
    text = "--model models/tiny-chat --engine torch --gpu h100 --gpus 2 --isl 512 --osl 128 --concurrency 32"
    out = tmp_path / "tiny"
    assert make_recipe.main([*text.split(), "--mode", "disaggregated", "--out", str(out)]) == 0
    recipe = load_recipe(out)
    assert recipe.model == "models/tiny-chat"
    assert recipe.workers["prefill"].devices == (0,) and recipe.workers["decode"].devices == (1,)
    assert recipe.workers["decode"].engine_config.cache_transceiver_config.backend == "CUDA_IPC"


def test_nodes_that_are_alike_have_a_job_of_as_many_servers(config, tmp_path):
    out = tmp_path / "made"
    assert asked(config, LLAMA, "--gpu h100 --gpus 16 --nodes 2 --isl 1000 --osl 200 --itl-ms 20", out) == 0
    (command,) = re.findall(r"^    python (tools/make_sbatch\.py .*)$", (out / "README.md").read_text(), re.MULTILINE)
    words = command.replace("NETWORK", "10.0.0.0/8").replace("job.sbatch", str(tmp_path / "job")).split()[1:]
    assert make_sbatch.main(words) == 0
    assert "#SBATCH --nodes=2" in (tmp_path / "job").read_text()
    assert make_manifests.main([str(out), "--image", "bireme:1", "--replicas", "2", "--out", str(tmp_path / "k")]) == 0


def test_stages_on_nodes_of_their_own_can_be_deployed(config, tmp_path):
    out = tmp_path / "made"
    text = "--gpu gb200 --gpus 64 --nodes 16 --isl 8150 --osl 1024 --concurrency 4096"
    assert asked(config, R1, text, out) == 0
    job = ["--apart", *NETWORK, "--gpus-per-node", "4", "--out", str(tmp_path / "job")]
    assert make_sbatch.main([str(out), *job]) == 0
    assert "#SBATCH --nodes=16" in (tmp_path / "job").read_text()
    assert sum(part.num_nodes for part in serve_nodes.server_parts(load_recipe(out), 4)) == 16
    pods = ["--apart", "--namespace", "llm", "--gpus-per-node", "4", "--out", str(tmp_path / "k8s")]
    assert make_manifests.main([str(out), "--image", "bireme:1", *pods]) == 0


@pytest.mark.parametrize(
    ("model", "text", "told"),
    [
        (R1, "--gpu h100 --gpus 8 --isl 8000 --osl 500 --concurrency 8", "--gpu h100: .* NVFP4 .* FP8 checkpoint"),
        (LLAMA, "--gpu h100 --gpus 16 --isl 80 --osl 50 --concurrency 8", "--gpus: 16 on each .* give --nodes 2"),
        (LLAMA, "--gpu h100 --gpus 9 --nodes 2 --isl 80 --osl 50 --concurrency 8", "--gpus 9: .* evenly"),
        (LLAMA, "--gpu h100 --gpus 8 --isl 131000 --osl 50 --concurrency 8", "--isl 131000 .* takes 131072"),
        (LLAMA, "--gpu h100 --gpus 8 --isl 1000 --osl 50", "--concurrency: missing"),
        (LLAMA, "--gpu h100 --gpus 8 --isl 1000 --osl 50 --itl-ms 1", r"--itl-ms 1: .* takes \d\.\d ms"),
        (
            LLAMA,
            "--gpu h100 --gpus 8 --isl 9000 --osl 50 --concurrency 8 --ttft-ms 9",
            "--ttft-ms 9: the fastest prompt",
        ),
        (
            LLAMA,
            "--gpu h100 --gpus 1 --isl 9000 --osl 50 --concurrency 900",
            "--concurrency 900: .* give at most so many",
        ),
        (LLAMA, "--gpu h100 --gpus 1 --isl 900 --osl 50 --concurrency 9 --mode disaggregated", "--gpus 2 or more"),
        (LLAMA, "--gpu h100 --gpus 8 --isl 900 --osl 50 --concurrency 8 --mtp 1", "--mtp: .* brings no layers"),
        (
            LLAMA,
            "--gpu h100 --gpus 8 --isl 900 --osl 50 --concurrency 8 --decode-ranks 3",
            "--decode-ranks 3: .* 32 heads",
        ),
        (
            LLAMA,
            "--gpu h100 --gpus 8 --isl 900 --osl 50 --concurrency 8 --decode-workers 9",
            "--decode-workers 9: no such workers fit",
        ),
        (
            "Qwen/Qwen3-235B-A22B",
            "--gpu h100 --gpus 4 --isl 900 --osl 50 --concurrency 8",
            "--gpus 4: .* 470 GB of weights.* give about 8 GPUs or more",
        ),
        (GPT_OSS, "--gpu h100 --gpus 2 --engine torch --isl 900 --osl 50 --concurrency 8", "--engine torch: .* mxfp4"),
        (
            LLAMA,
            "--gpu h100 --gpus 2 --engine torch --isl 900 --osl 50 --concurrency 8 --decode-ranks 2",
            "--engine torch: an engine has one GPU",
        ),
        (LLAMA, "--gpu h100 --gpus 2 --isl 900 --osl 50 --concurrency 8 --timings nowhere", "nowhere: No such file"),
        (
            LLAMA,
            "--gpu h100 --gpus 2 --isl 900 --osl 50 --concurrency 8 --timings aiconfigurator",
            "--timings-python .*: no such program; make one",
        ),
    ],
)
def test_what_can_t_be_is_refused_by_its_name_with_the_remedy(model, text, told, config, tmp_path, capsys):
    assert asked(config, model, text, tmp_path / "made") == 2
    said = capsys.readouterr().err
    assert re.search(told, said), said
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": "many"}, "not the shape of a model"),
        ({"num_hidden_layers": 0}, "0 layers"),
        ({"vocab_size": None}, "not the shape of a model"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types has linear_attention"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"mamba_num_heads": 8}, "mamba_num_heads"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization awq"),
    ],
)
def test_a_model_that_can_t_be_sized_is_refused(changes, told, config, tmp_path, capsys):
    path = config(LLAMA, **changes)
    text = ["--gpu", "h100", "--gpus", "1", "--isl", "80", "--osl", "50", "--concurrency", "1"]
    assert make_recipe.main(["--model", LLAMA, "--config", str(path), *text, "--out", str(tmp_path / "made")]) == 2
    assert told in capsys.readouterr().err


GARBAGE = ("x", -1, 10**30, [1], {"a": 1}, None, float("inf"))


@pytest.mark.parametrize("model", [LLAMA, R1])
def test_whatever_stands_in_a_config_it_is_sized_or_refused(model, config, tmp_path):
    text = "--gpu b200 --gpus 8 --isl 500 --osl 50 --concurrency 8 --out"
    for key in (*CONFIGS[model], "text_config", "sliding_window"):
        for value in GARBAGE:
            path = config(model, **{key: value})
            options = make_recipe.parse(
                ["--model", model, "--config", str(path), *text.split(), str(tmp_path / "made")]
            )
            with contextlib.suppress(ConfigError):
                wish = make_recipe.wish_of(options)
                with make_recipe.timings_of(options, wish) as timings:
                    assert plan(wish, timings).requests_per_s > 0


def test_a_model_s_name_is_no_word_of_yaml_s(config, tmp_path):
    for name in ("yes", "a: b", "x\n- y", "org/1.0"):
        text = ["--gpu", "h100", "--gpus", "1", "--isl", "80", "--osl", "50", "--concurrency", "1", "--force"]
        out = tmp_path / "made"
        assert make_recipe.main(["--model", name, "--config", str(config(LLAMA)), *text, "--out", str(out)]) == 0
        assert load_recipe(out).model == name


def test_a_hub_id_needs_its_config_and_a_folder_is_not_overwritten(config, tmp_path, capsys):
    text = "--gpu h100 --gpus 1 --isl 80 --osl 50 --concurrency 1"
    assert make_recipe.main(["--model", LLAMA, *text.split(), "--out", str(tmp_path / "made")]) == 2
    assert "--config FILE" in capsys.readouterr().err
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.tex").write_text("")
    assert asked(config, LLAMA, f"{text} --force", own) == 2
    assert "name another folder" in capsys.readouterr().err and (own / "thesis.tex").exists()
    assert asked(config, LLAMA, text, tmp_path / "made") == 0
    assert asked(config, LLAMA, text, tmp_path / "made") == 2
    assert asked(config, LLAMA, f"{text} --force", tmp_path / "made") == 0


def test_long_prompts_may_come_among_usual_ones(config, tmp_path, capsys):
    text = "--gpu h100 --gpus 2 --isl 1000 --osl 200 --concurrency 64 --mode disaggregated --max-prompt 30000"
    assert asked(config, LLAMA, text, tmp_path / "made") == 0
    recipe = load_recipe(tmp_path / "made")
    prefill, decode = (recipe.workers[stage].engine_config for stage in ("prefill", "decode"))
    assert prefill.max_seq_len == 30000 and prefill.max_num_tokens == 16384 and prefill.enable_chunked_prefill
    assert decode.max_seq_len == 30200 and decode.cache_transceiver_config.max_tokens_in_buffer == 30080
    assert decode.max_batch_size == 64
    assert asked(config, LLAMA, text.replace("30000", "300"), tmp_path / "other") == 2
    assert "--max-prompt 300: less than --isl 1000" in capsys.readouterr().err


def test_measured_step_times_take_the_place_of_estimates(config, tmp_path, capsys):
    text = "--gpu h100 --gpus 1 --isl 1000 --osl 200 --concurrency 32 --engine torch --timings h100-8b-bf16"
    assert asked(config, LLAMA, text, tmp_path / "made") == 0
    assert "measured: H100" in capsys.readouterr().out


@pytest.fixture
def tables(tmp_path):
    """Return a program that answers as the Python with aiconfigurator-core, which has no tables for two ranks."""
    path = tmp_path / "python"
    path.write_text(
        f"""#!{sys.executable}
import json, sys
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["layout"]["tp_size"] == 2:
        print(json.dumps({{"error": "no data"}}), flush=True)
    else:
        print(json.dumps({{"ms": asked.get("prefill", 100 * asked.get("rows", 0)) / 100}}), flush=True)
"""
    )
    path.chmod(0o755)
    return path


def test_times_may_come_from_a_library_in_a_python_of_its_own(config, tables, tmp_path, capsys):
    text = "--gpu h100 --gpus 2 --isl 1000 --osl 200 --concurrency 8 --mode aggregated --json --timings aiconfigurator"
    assert asked(config, LLAMA, f"{text} --timings-python {tables}", tmp_path / "made") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "AIConfigurator" in told["timings"] and told["workers"]["decode"]["layout"] == "TP1"
    assert told["ttft_ms"] == 10 + 4  # a prompt, and a step of four sequences
    assert asked(config, LLAMA, f"{text} --timings-python {tables} --decode-ranks 2", tmp_path / "other") == 2
    assert "no data" in capsys.readouterr().err


def test_a_python_without_the_library_is_refused(config, tmp_path, capsys):
    text = "--gpu h100 --gpus 2 --isl 1000 --osl 200 --concurrency 8 --timings aiconfigurator"
    assert asked(config, LLAMA, f"{text} --timings-python {sys.executable}", tmp_path / "made") == 2
    assert "aiconfigurator-core can't be imported" in capsys.readouterr().err


def shapes_and_loads(seed):
    """Return a model and options such as somebody might ask for."""
    draw = random.Random(seed)
    model = draw.choice(sorted(CONFIGS))
    gpu = draw.choice(
        ("b200", "gb200") if "FP4" in model and draw.random() < 0.9 else ("h100", "h200", "b200", "gb200")
    )
    nodes = draw.choice((1, 1, 2, 3, 4, 16))
    options = {
        "gpu": gpu,
        "gpus": nodes * draw.choice((1, 2, 4) if gpu == "gb200" else (1, 2, 3, 4, 8, 8)),
        "nodes": nodes,
        "isl": draw.choice((1, 17, 500, 4000, 32000, 120000)),
        "osl": draw.choice((1, 100, 1024, 8000)),
        "mode": draw.choice(("auto", "aggregated", "disaggregated")),
        "engine": "torch" if draw.random() < 0.15 else "trtllm",
        "attention-dp": draw.choice(("auto", "auto", "on", "off")),
        "mtp": draw.choice(("off", "auto", "2")) if "DeepSeek" in model or draw.random() < 0.05 else "off",
    }
    if draw.random() < 0.7:
        options["concurrency"] = draw.choice((1, 3, 64, 500, 5000))
    if draw.random() < 0.5 or "concurrency" not in options:
        options |= {"ttft-ms": draw.choice((50, 500, 5000)), "itl-ms": draw.choice((5, 20, 200))}
    if draw.random() < 0.2:
        options["max-prompt"] = draw.choice((500, 9000, 100_000))
    if draw.random() < 0.2:
        options["decode-ranks"] = draw.choice((1, 2, 4, 8, 16))
    return model, " ".join(f"--{name} {value}" for name, value in options.items())


def test_whatever_is_asked_for_a_recipe_is_good_or_refused(config, tmp_path, capsys):
    made = 0
    for seed in range(120):
        model, text = shapes_and_loads(seed)
        out = tmp_path / str(seed)
        code = asked(config, model, text, out)
        told = capsys.readouterr()
        assert code in (0, 2), f"{model} {text}: {told}"
        if code == 2:
            assert re.match(r"--[a-z]", told.err), f"{model} {text}: {told.err}"
            continue
        made += 1
        found = [str(finding) for finding in check_folder(out)]
        assert all(ON_NODES_OF_THEIR_OWN in line for line in found), f"{model} {text}: {found}"
        for path in out.glob("*.yaml"):
            assert isinstance(yaml.safe_load(path.read_text()), dict)
    assert made >= 30
