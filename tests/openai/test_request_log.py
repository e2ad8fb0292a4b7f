"""What the frontend's request log says of its callers."""

import json

from bireme.metrics import Registry
from bireme.observability.request_log import RequestLog
from bireme.observability.rotated_files import RotatedFiles
from bireme.observability.traces import Traces
from tests.openai.api_keys import bearer, keys_of


async def test_each_key_s_requests_are_told_apart_and_share_nothing(frontend, tmp_path):
    metrics = Registry("frontend")
    files = RotatedFiles(tmp_path / "log", "frontend", 1 << 20, 4)
    log, traces = RequestLog(files, 2, b"k" * 32, "tiny", metrics), Traces(metrics)
    traces.subscribe(log.note, wants_all=True, wants_details=False, close=log.close)
    bench = await frontend(keys=keys_of("alice", "bob"), traces=traces)
    for name in ("alice", "bob", "alice"):
        reply = bench.chat(bearer(name) | {"x-request-id": f"of-{name}"})
        await bench.workers.emit(4)
        assert (await reply.end()).status == 200
    assert (await bench.chat(bearer("alice"), max_tokens=-1).end()).status == 400  # it has no prompt yet
    await bench.app.stop()
    lines = [json.loads(line) for line in (tmp_path / "log.frontend.jsonl").read_text().splitlines()]
    assert [line["bireme"]["key"] for line in lines] == ["alice", "bob", "alice"]
    assert [line["request"]["x_request_id"] for line in lines] == ["of-alice", "of-bob", "of-alice"]
    assert {line["request"]["model"] for line in lines} == {"test"}
    assert {line["request"]["output_tokens"] for line in lines} == {4}
    first, second, third = (line["request"]["replay"]["input_sequence_hashes"] for line in lines)
    assert first == third and not set(first) & set(second)
