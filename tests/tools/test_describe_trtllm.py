"""tools/describe_trtllm.py: the settings of an installed TensorRT-LLM (here the stand-in) against the contract."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Annotated, Literal

import pydantic
import pytest

from bireme.config import CHECKOUT
from tests.contract import stand_in_workers
from tools import describe_trtllm

TOOL = CHECKOUT / "tools" / "describe_trtllm.py"


@functools.cache
def modules_of(profile):
    """Return the stand-in's modules as one release; to import them takes seconds."""
    with stand_in_workers.imported(profile):
        importlib.import_module("tensorrt_llm.llmapi.llm_args")
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "tensorrt_llm"}


@pytest.fixture
def run(capsys):
    """Return a caller of the tool where the package is the stand-in: exit code, and what it printed."""

    def call(profile, *arguments):
        modules = modules_of(profile)
        with stand_in_workers.imported(profile):
            sys.modules.update(modules)
            return describe_trtllm.main(arguments), capsys.readouterr().out

    return call


@pytest.mark.parametrize("profile", stand_in_workers.PROFILES)
def test_the_stand_in_agrees_with_the_contract_of_its_release(run, profile):
    assert run(profile) == (0, f"0 difference(s) from the contract of {profile[:3]}\n")


def test_it_runs_as_a_program_in_the_engine_s_python():
    environment = os.environ | {"PYTHONPATH": str(stand_in_workers.STAND_IN), "TRTLLM_STAND_IN": "1.3"}
    done = subprocess.run([sys.executable, TOOL], env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 difference(s) from the contract of 1.3\n"), done.stderr


def test_an_older_package_differs_by_what_is_new_and_gone(run):
    code, out = run("1.2.1", "--release", "1.4")
    lines = out.splitlines()
    assert code == 1
    assert {"new    enable_sleep", "gone   kv_cache_config.block_reuse_config.policy"} <= set(lines)
    assert any(line.startswith("words  moe_config.backend takes WIDEEP") for line in lines)


def test_what_is_new_is_written_as_the_contract_writes_it(run):
    code, out = run("1.3", "--release", "1.2", "--contract")
    assert code == 0
    lines = out.splitlines()
    at = lines.index('    policy: ["all_reusable | per_request | per_conversation", all_reusable, {since: "1.2"}]')
    assert lines[at - 1] == "  BlockReuseConfig:"
    assert '    num_serve_frontends: ["int 1..64", 1, {since: "1.2"}]' in lines


def test_paths_are_listed_with_their_words(run):
    lines = run("1.4", "--paths")[1].splitlines()
    assert "kv_cache_config.dtype auto bfloat16 float16 float32 fp8 fp8_ds_mla nvfp4" in lines


@pytest.fixture
def manifest(tmp_path):
    rows = [("stream_interval", []), ("brand_new.block", []), ("orchestrator_type", ["rpc", "ray", "other"])]
    entries = [{"path": path, "allowed_values": words, "kind": "value"} for path, words in rows]
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"TorchLlmArgs": entries}))
    return path


def test_a_manifest_tells_what_is_new_without_the_package(manifest, capsys):
    assert describe_trtllm.main(["--manifest", str(manifest), "--release", "1.4"]) == 1
    new, words, count = capsys.readouterr().out.splitlines()
    assert new == "new    brand_new.block" and words == "words  orchestrator_type takes other, too"
    assert count == "2 difference(s) from the contract of 1.4"


def test_without_package_and_manifest_there_is_nothing_to_describe(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    monkeypatch.setattr(describe_trtllm.importlib.util, "find_spec", lambda name: None)
    assert describe_trtllm.main([]) == 2 and "give --manifest" in capsys.readouterr().err


def test_a_package_s_own_manifest_is_read_where_its_classes_can_t_be(tmp_path, manifest, monkeypatch, capsys):
    (tmp_path / "usage").mkdir()
    manifest.rename(tmp_path / describe_trtllm.MANIFEST)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(describe_trtllm.importlib.util, "find_spec", lambda name: spec)
    assert describe_trtllm.main(["--paths"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "brand_new.block"


class Inner(pydantic.BaseModel):
    depth: Annotated[int, pydantic.Field(gt=0)] = 3
    share: Annotated[float, pydantic.Field(gt=0)] = 0.5


class First(pydantic.BaseModel):
    kind: Literal["first"] = "first"
    ratio: float = pydantic.Field(0.5, ge=0, le=1)


class Second(pydantic.BaseModel):
    kind: Literal["second"] = "second"
    inner: Inner | None = None


class Args(pydantic.BaseModel):
    choice: Annotated[First | Second, pydantic.Field(discriminator="kind")] | None = None
    sizes: list[Annotated[int, pydantic.Field(ge=1)]] | None = None


def test_classes_of_a_union_are_read_together_and_as_deep_as_they_go():
    assert describe_trtllm.rows_of_class(Args) == {
        "choice.kind": {"first", "second"},
        "choice.ratio": frozenset(),
        "choice.inner.depth": frozenset(),
        "choice.inner.share": frozenset(),
        "sizes": frozenset(),
    }


def test_types_are_written_in_the_contract_s_notation():
    wanted = {"choice.ratio", "choice.inner.depth", "choice.inner.share", "sizes"}
    assert list(describe_trtllm.entries(Args, wanted, "1.5")) == [
        '  Inner:\n    depth: ["int >= 1", 3, {since: "1.5"}]',
        '  Inner:\n    share: ["float >= 0", 0.5, {since: "1.5"}]',
        '  First:\n    ratio: ["float 0..1", 0.5, {since: "1.5"}]',
        '  Args:\n    sizes: ["list[int >= 1] | null", null, {since: "1.5"}]',
    ]
