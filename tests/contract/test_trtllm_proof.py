"""tests/gpu/trtllm.sh on the stand-in: green from a read-only checkout, and red for each feature that is broken."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.contract import stand_in_workers
from tests.contract.stand_in_workers import CHECKOUT, STAND_IN
from tests.docker.made_environments import add_distribution, make_environment
from tests.gpu.trtllm_proof import answer_rows, kv_rows, machine, program
from tests.gpu.trtllm_proof.bench import Bench, Failed
from tests.gpu.trtllm_proof.engine_process import run
from tests.gpu.trtllm_proof.lives import LIVES, Life
from tests.gpu.trtllm_proof.reference import Reference

SCRIPT = CHECKOUT / "tests" / "gpu" / "trtllm.sh"
OF_TESTS = ("pytest", "pytest_asyncio", "pytest_timeout", "pytest_rerunfailures", "hypothesis", "xdist", "bireme")
OF_THE_SCRIPT = "1.3"  # the release with which the script itself runs
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
pytestmark = pytest.mark.skipif(stand_in_workers.is_real_there(), reason="the script itself proves a real tensorrt_llm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The first run makes its model there, and the others find it."""
    return tmp_path_factory.mktemp("proof")


@pytest.fixture
def model(folder):
    return Bench(folder, "decode", {}).make_model()


# -- the script as a stranger runs it


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """One with the stand-in as its tensorrt_llm, and without anything of tests."""
    folder = tmp_path_factory.mktemp("python")
    site = make_environment(folder, sys._base_executable, without=OF_TESTS)
    (site / "tensorrt_llm").symlink_to(STAND_IN / "tensorrt_llm")
    add_distribution(site, "tensorrt_llm", "1.2.1")
    assert subprocess.run([folder / "bin" / "python", "-c", "import pytest"], capture_output=True).returncode
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def read_only():
    """What makes a command see this checkout without being able to write it."""
    prefix = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(CHECKOUT)]
    probe = subprocess.run([*prefix, "touch", str(CHECKOUT / "written")], capture_output=True, text=True)
    if "Read-only" not in probe.stderr:
        (CHECKOUT / "written").unlink(missing_ok=True)
        pytest.skip(f"nothing can be mounted here: {probe.stderr.strip()}")
    return prefix


def run_script(python, tmp_path, *arguments, prefix=(), gpus=1, **variables):
    """Run it where nvidia-smi tells of so many GPUs, in a home that is not there."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\n" + "echo 'NVIDIA Pretended, 81920, 590.44'\n" * gpus)
    (programs / "nvidia-smi").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BIREME"))}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": "/nonexistent", "BIREME_ENGINE_PYTHON": python}
    command = [*prefix, "sh", str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, cwd="/", env=environment | variables, capture_output=True, text=True)
    return done, json.loads(done.stdout or "null")


def outcomes(report):
    return {row["name"]: row["outcome"] for row in report["rows"]}


def test_it_is_all_green_without_pytest_from_a_checkout_that_can_not_be_written(python, read_only, folder, tmp_path):
    """With one release. What the rows say of the others, in this process: below."""
    variables = {"TRTLLM_STAND_IN": OF_THE_SCRIPT, "HF_TOKEN": "hf_secretsecretsecret", "TMPDIR": str(tmp_path)}
    done, report = run_script(python, tmp_path, "--folder", folder, prefix=read_only, OMP_NUM_THREADS="1", **variables)
    assert done.returncode == 0, done.stderr
    found = outcomes(report)
    assert {name for name, outcome in found.items() if outcome != "ok"} == {"apart on two GPUs"}
    assert found.keys() >= {*LIVES["one"].rows, "speculation: drafts", "apart on one GPU: decode transfer"}
    assert report["verdict"] == "nothing failed"
    assert report["gpus"][0] == {"name": "NVIDIA Pretended", "memory_mib": "81920", "driver": "590.44"}
    assert {"torch", "transformers", "xgrammar", "tensorrt-llm"} <= report["packages"].keys()
    assert "secretsecret" not in done.stdout


@pytest.mark.parametrize(
    ("gpus", "pairs", "skipped"),
    [(["4"], [("4", "4")], ["apart on two GPUs"]), (["4", "7", "9"], [("4", "4"), ("4", "7")], [])],
)
def test_with_two_gpus_prefill_and_decode_are_proved_apart_on_them_as_well(monkeypatch, folder, gpus, pairs, skipped):
    asked = []
    proof = program.Proof(folder, program.Limits(start_s=1, row_s=1))
    monkeypatch.setattr(proof, "alone", lambda life, prefix="": proof.rows.append(program.Outcome(life, "ok")))
    monkeypatch.setattr(proof, "apart", lambda prefix, pair: asked.append(pair))
    program.prove(proof, gpus)
    assert asked == pairs
    assert [row.name for row in proof.rows if row.outcome == "skipped"] == skipped


@pytest.mark.parametrize("arguments", [["--help"], ["recipes", "-h"]])
def test_it_says_what_it_does_where_there_is_no_tensorrt_llm(tmp_path, arguments):
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    done = subprocess.run(
        ["sh", SCRIPT, *arguments], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "--row-timeout" in done.stdout and "#" not in done.stdout, done.stderr


def test_without_a_gpu_there_is_nothing_to_try(python, tmp_path):
    done, report = run_script(python, tmp_path, gpus=0)
    assert done.returncode == 2
    assert "nvidia-smi shows no GPU" in report["verdict"]


@pytest.mark.parametrize(("outcome", "code"), [("ok", 0), ("skipped", 0), ("fail", 1)])
def test_the_exit_code_is_that_of_the_worst_row_and_stdout_is_the_report(monkeypatch, capsys, tmp_path, outcome, code):
    monkeypatch.setattr(sys, "argv", ["trtllm.sh", "--folder", str(tmp_path)])
    monkeypatch.setattr(machine, "has_tensorrt_llm", lambda: True)
    monkeypatch.setattr(machine, "find_gpus", lambda: [{"name": "NVIDIA Pretended"}])
    outcomes = [program.Outcome("first", "ok"), program.Outcome("second", outcome), program.Outcome("third", "ok")]
    monkeypatch.setattr(program, "prove", lambda proof, gpus: proof.rows.extend(outcomes))
    assert program.main() == code
    assert [row["outcome"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["ok", outcome, "ok"]


@pytest.mark.usefixtures("model")
def test_what_hangs_or_ends_its_process_is_a_red_row_and_the_next_rows_have_a_new_engine(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("TRTLLM_STAND_IN", "1.3")
    monkeypatch.setenv("TRTLLM_STAND_IN_BROKEN", "errors,hang")
    one = LIVES["one"]
    few = {name: one.rows[name] for name in ("start", "errors", "sampling", "bias")}
    monkeypatch.setitem(program.LIVES, "one", Life(one.stage, one.yaml, few))
    monkeypatch.setattr(program.Limits, "of", lambda self, row: 5 if row == "sampling" else 120)
    proof = program.Proof(folder, program.Limits(start_s=120, row_s=120))
    proof.alone("one")
    assert [(row.name, row.outcome) for row in proof.rows] == [
        ("start", "ok"),
        ("errors", "fail"),
        ("start", "ok"),
        ("sampling", "fail"),
        ("start", "ok"),
        ("bias", "ok"),
    ]
    ended, hanging = proof.rows[1], proof.rows[3]
    assert "the engine's process ended with 70: reason=EngineDeadError" in ended.reason
    assert hanging.reason == "no end in 5 s"
    assert any("in choose" in line for line in hanging.traceback), hanging.traceback
    assert processes_with(str(folder)) == []


def processes_with(word):
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [file.parent.name] if word.encode() in file.read_bytes() else []
    return found


@pytest.mark.usefixtures("model")
def test_without_an_engine_its_rows_are_skipped_with_the_reason(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("TRTLLM_STAND_IN_BROKEN", "start")
    proof = program.Proof(folder, program.Limits(start_s=120, row_s=60))
    proof.alone("speculation", "speculation: ")
    start, drafts = proof.rows
    assert start.outcome == "fail" and "could not load" in start.reason and "planted" in start.reason
    assert (drafts.outcome, drafts.reason) == ("skipped", "there is no engine: see `speculation: start`")


def test_a_report_holds_no_secret_no_home_and_no_name(monkeypatch):
    monkeypatch.setenv("NGC_API_KEY", "abcdefgh")
    monkeypatch.setenv("BIREME_KEY", "00ff00ff")
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "alices-box")
    monkeypatch.setattr(machine.getpass, "getuser", lambda: "alice")
    text = "alices-box /home/alice/x /tmp/run/model abcdefgh 00ff00ff hf_0123456789ab http://me:pw@host alice malice"
    said = machine.clean({"rows": [{"reason": text}]}, Path("/tmp/run"))["rows"][0]["reason"]
    assert said == "HOST ~/x FOLDER/model *** *** *** http://***@host USER malice"


def test_the_reference_is_what_transformers_computes(model):
    import torch
    from transformers import AutoModelForCausalLM

    tokens = list(range(500, 600))
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Reference(model).logits(tokens), expected, atol=1e-3, rtol=1e-3)


# -- every row with every release, and a feature that is broken is a red row

BROKEN = {  # way of the stand-in (tensorrt_llm/_broken.py) -> life, row, what it says
    "contract": ("one", "contract", "LLM.generate_async.cache_salt: missing"),
    "generate": ("one", "generate", "token 3 of a greedy answer"),
    "batch": ("one", "batch", "of a greedy answer"),
    "stream": ("one", "stream", "24 tokens came in 1 pieces"),
    "stop ids": ("one", "stop ids", "it went on behind token"),
    "end id": ("one", "end id", "it went on behind token"),
    "cancel": ("one", "cancel", "it was ended early, and TensorRT-LLM went on to its last token"),
    "log probabilities": ("one", "log probabilities", "by the reference"),
    "prompt log probabilities": ("one", "prompt log probabilities", "none came"),
    "sampling": ("one", "sampling", "is not among the best 5"),
    "seeds": ("one", "seeds", "one seed gave two answers"),
    "penalties": ("one", "penalties", "repetition_penalty 0.1"),
    "bad words": ("one", "bad words", "came, and was forbidden"),
    "bias": ("one", "bias", "a bias of 100 on token 777 gave"),
    "least tokens": ("one", "least tokens", "min_tokens 10"),
    "processors": ("one", "processors", "allowed were 811 and 812"),
    "guides": ("one", "guides", "is no match of"),
    "reuse": ("one", "reuse", "of 100 tokens that were asked before"),
    "salts": ("one", "salts", "of another salt's request were found"),
    "KV events": ("one", "KV events", "3 blocks were stored, and 0 others told of"),
    "statistics": ("one", "statistics", "steps and KV blocks are not told"),
    "times": ("one", "times", "the time in the queue is not told"),
    "drafts": ("speculation", "drafts", "token 3 of a greedy answer"),
    "export": ("prefill", "export", "exported no KV of this prefill"),
    "KV": ("decode", "transfer", "of a greedy answer"),
    "transfer": ("decode", "transfer", "KV of the prefill did not arrive"),
}
ELSEWHERE = {"start", "errors", "hang"}  # above: no engine, or none any more
OF_TWO_ROWS = {"cancel": "stop strings", "reuse": "salts"}  # what a way breaks besides
SERVED_BY_BIREME = {  # with 1.2.1, whose sampler ignores them
    "penalties": ("processors", "repetition_penalty 0.1"),
    "bad words": ("bias", "came, and was forbidden"),
}


@pytest.fixture(scope="module")
def bench(profile, folder):
    """Return the bench of a life, its engine started."""
    benches = {}

    def of(life):
        if life not in benches:
            benches[life] = Bench(folder, LIVES[life].stage, LIVES[life].yaml, limit_s=60, wait_s=0.5)
            benches[life].make_model()
            assert run(LIVES[life].rows["start"], benches[life])["outcome"] == "ok"
        return benches[life]

    yield of
    for one in benches.values():
        one.stop()


@pytest.mark.parametrize("profile", sorted({*stand_in_workers.PROFILES} - {OF_THE_SCRIPT}), indirect=True)
def test_every_row_is_green_with_the_other_releases(bench, monkeypatch):
    rows = [(life, row) for life in LIVES for row in LIVES[life].rows if row not in ("start", "transfer")]
    for life, row in [*rows, ("decode", "transfer")]:  # of what the life prefill has exported
        monkeypatch.setattr(bench(life), "wait_s", 10.0)
        told = run(LIVES[life].rows[row], bench(life))
        assert told["outcome"] == "ok", (life, row, told)


@pytest.mark.parametrize("profile", ["1.3"], indirect=True)
def test_each_way_to_be_broken_is_tried(profile):
    from tensorrt_llm._broken import WAYS

    assert WAYS.keys() == BROKEN.keys() | ELSEWHERE


@pytest.mark.parametrize("profile", ["1.3"], indirect=True)
def test_what_a_release_adds_is_a_warning_and_no_failure(profile, monkeypatch, folder):
    described = answer_rows.describe()
    described["generate_async"]["surprise"] = "None"
    described["llm_args"].remove("max_batch_size")
    monkeypatch.setattr(answer_rows, "describe", lambda: described)
    told = run(LIVES["one"].rows["contract"], Bench(folder, "decode", {}))
    assert told["outcome"] == "ok"
    assert told["warnings"] == ["LLM.generate_async.surprise: new", "LlmArgs.max_batch_size: missing"]


@pytest.mark.parametrize("profile", ["1.3"], indirect=True)
@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_feature_is_a_red_row_that_says_so(bench, monkeypatch, way):
    life, row, text = BROKEN[way]
    broken = bench(life)
    prepare(bench, life, row, monkeypatch)
    told = run_broken(monkeypatch, way, LIVES[life].rows[row], broken)
    assert told["outcome"] == "fail"
    assert text in told["reason"]
    if other := OF_TWO_ROWS.get(way):
        assert text in run_broken(monkeypatch, way, LIVES[life].rows[other], broken)["reason"]
    assert not broken.has_ended


@pytest.mark.parametrize("profile", ["1.2.1"], indirect=True)
@pytest.mark.parametrize("row", SERVED_BY_BIREME)
def test_what_bireme_serves_itself_is_a_red_row_as_well_when_it_is_broken(bench, monkeypatch, row):
    way, text = SERVED_BY_BIREME[row]
    assert run(LIVES["one"].rows[row], bench("one"))["outcome"] == "ok"
    told = run_broken(monkeypatch, way, LIVES["one"].rows[row], bench("one"))
    assert told["outcome"] == "fail" and text in told["reason"]


class LateReuse:
    """A bench whose engine finds blocks some time after their request, and whatever the salt."""

    def __init__(self):
        self.num_asked = 0

    def prompt(self, length):
        return [300] * length

    def ask(self, prompt, **fields):
        self.num_asked += 1
        return SimpleNamespace(num_cached=96 if self.num_asked > 3 else 0)

    def check_greedy(self, done):
        pass

    def wait_for(self, is_there, what):
        assert any(is_there() for _ in range(10)), what


def test_salts_that_nothing_heeds_are_seen_where_blocks_are_found_late():
    with pytest.raises(Failed, match="96 tokens of another salt's request were found"):
        kv_rows.salts(LateReuse())


def prepare(bench, life, row, monkeypatch):
    """What the row needs of before, and what would take long."""
    monkeypatch.setattr(answer_rows, "_LONG", 60)
    if life == "one":
        assert bench(life).greedy.tokens
    if row == "transfer":
        assert run(LIVES["prefill"].rows["export"], bench("prefill"))["outcome"] == "ok"
        transceiver = bench(life).engine.llm.args.cache_transceiver_config
        monkeypatch.setattr(transceiver, "kv_transfer_timeout_ms", 300)


def run_broken(monkeypatch, way, row, bench):
    from tensorrt_llm import _broken

    with monkeypatch.context() as patched:
        patched.setattr(*_broken.WAYS[way]())
        return run(row, bench)
