"""The stand-in says what the contract says; so must a real tensorrt_llm, where one is installed."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.contract import stand_in_workers
from tests.contract.contract_drift import drift
from tests.contract.describe_api import USED, describe

CONTRACT = Path(__file__).resolve().parents[2] / "bireme" / "engines" / "trtllm" / "contract.yaml"
DESCRIBE = Path(__file__).parent / "describe_api.py"


@pytest.fixture(scope="module")
def contract():
    return yaml.safe_load(CONTRACT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=stand_in_workers.PROFILES)
def described(request):
    with stand_in_workers.imported(request.param):
        return describe()


def test_the_stand_in_has_not_drifted_from_the_contract(described, contract):
    assert drift(described, contract, USED) == []


ERRORS = "tensorrt_llm.executor.utils"
PLANTED = {
    "LLM.generate_async.cache_salt: missing": lambda tree: tree["generate_async"].pop("cache_salt"),
    "LLM.generate_async.surprise: new": lambda tree: tree["generate_async"].update(surprise="None"),
    "LLM.generate_async.streaming: default True": lambda tree: tree["generate_async"].update(streaming="True"),
    "SamplingParams.max_tokens: default 99": lambda tree: tree["sampling_params"].update(max_tokens="99"),
    "DisaggregatedParams.opaque_state: missing": lambda tree: tree["disaggregated_params"].pop("opaque_state"),
    "LlmArgs.max_batch_size: missing": lambda tree: tree["llm_args"].remove("max_batch_size"),
    "tensorrt_llm.executor.utils.RequestError: missing": lambda tree: tree["names"][
        "tensorrt_llm.executor.utils"
    ].clear(),
    "LLM.get_stats_async: missing": lambda tree: tree["methods"].remove("get_stats_async"),
    "RequestError: a ValueError": lambda tree: tree.update(request_error_base="ValueError"),
    "CompletionOutput.logprobs: missing": lambda tree: tree["completion_output"].pop("logprobs"),
    "MetricsCollector: neither": lambda tree: tree["collector"].clear(),
}


@pytest.mark.parametrize("line", PLANTED)
def test_a_difference_is_reported_by_name(described, contract, line):
    changed = copy.deepcopy(described)
    PLANTED[line](changed)
    found = drift(changed, contract, USED)
    assert any(text.startswith(line) for text in found), found


@pytest.mark.skipif(not stand_in_workers.is_real_there(), reason="no tensorrt_llm is installed")
def test_the_installed_release_has_not_drifted_from_the_contract(contract):
    done = subprocess.run([sys.executable, DESCRIBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = drift(json.loads(done.stdout.splitlines()[-1]), contract, USED)
    assert found == [], "\n".join(["tensorrt_llm differs from contract.yaml:", *found])
