"""Step records as others read them: ai-dynamo's own relay, subscriber and structs, and a client of NATS."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.contenders import dynamo
from bireme.kv.wire.step_records import StepRing
from tests.engines.engine_fixtures import wait_for
from tests.kv.publishing.published import Published
from tests.kv.publishing.test_step_stream import QUEUED, SCHEDULED, step

READER = Path(__file__).parent / "step_record_reader.py"


@pytest.fixture
def published(tmp_path):
    one = Published(tmp_path, host="127.0.0.1", ring=StepRing(), has_events=False)
    yield one
    one.close()


def test_dynamo_s_relay_and_subscriber_read_them(published, tmp_path):
    command = [dynamo.environment(), str(READER), published.record.step_endpoint, "20"]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"DYN_FILE_KV": str(tmp_path / "kv")})

    def has_ended():
        published.ring.add(step(path="packed"))
        published.publisher.wake()
        return reader.poll() is not None

    wait_for(has_ended, 60)
    records = json.loads(reader.communicate()[0])
    assert len(records) == 20 and reader.returncode == 0
    numbers = [record["counter_id"] for record in records]
    assert numbers == sorted(set(numbers))
    first = {name: value for name, value in records[0].items() if name != "counter_id"}
    assert first == {
        "version": 1,
        "worker_id": "decode@here:1",
        "dp_rank": 0,
        "wall_time": 0.005,
        "scheduled_requests": SCHEDULED,
        "queued_requests": QUEUED,
    }
