"""ai-dynamo's code for TensorRT-LLM, which is known to work with the real package, on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.contenders import dynamo
from tests.contract import stand_in_workers

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module", params=stand_in_workers.PROFILES)
def found(request, sample_model):
    """What Dynamo's code and ours make of the same requests, in a process of their own for each release."""
    (packages,) = Path(dynamo.environment()).parents[1].glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "tests.contract.dynamo_caller", packages, sample_model("llama")]
    environment = os.environ | stand_in_workers.environment(request.param)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"release": request.param}


def test_its_codec_and_ours_give_decode_the_same_params(found):
    assert found["codecs"]["ours"] == found["codecs"]["theirs"]
    assert found["codecs"]["ours"]["opaque_state"] == repr(bytes(range(256)))


def test_its_handlers_give_our_tokens_together_and_apart(found):
    if found["release"] == "1.2.1":
        pytest.skip("ai-dynamo 1.6.1 gives each request what 1.2.1 has no argument for")
    ours = found["tokens"]
    assert (found["together"], found["handed"], found["apart"]) == (ours, ours[:1], ours)


def test_its_publisher_and_our_reader_see_the_same_blocks(found):
    assert found["events"]["ours"] == found["events"]["theirs"]
    assert [kind for kind, _, _ in found["events"]["ours"]].count("stored") >= 2
