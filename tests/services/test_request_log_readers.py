"""A request log as others read it: ai-dynamo's own simulator."""

import json
import os
import subprocess
from pathlib import Path

from benchmarks.contenders import dynamo
from bireme.metrics import Registry
from bireme.observability.request_log import RequestLog
from bireme.observability.rotated_files import RotatedFiles
from tests.observability.test_request_log import KEY, traced

READER = Path(__file__).parent / "request_log_reader.py"


def test_dynamo_s_simulator_replays_it_compressed_files_as_well(tmp_path):
    log = RequestLog(RotatedFiles(tmp_path / "log", "generate", 64 << 10, 64), 4, KEY, "tiny", Registry("generate"))
    for number in range(200):
        log.note(traced([*range(20), *range(100 * number, 100 * number + 7)]))
    log.note(traced(range(5), range(5), usage=None, reason="", error="UNAVAILABLE: no worker"))
    log.close()
    files = sorted(map(str, tmp_path.iterdir()))
    assert any(file.endswith(".jsonl.gz") for file in files)
    command, quiet = [dynamo.environment(), str(READER), *files], os.environ | {"DYN_LOG": "error"}
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=quiet).stdout)
    assert found == {
        "completed_requests": 202,
        "total_input_tokens": 200 * 27 + 2 * 5,
        "total_output_tokens": 200 * 3 + 2 * 2,
    }
