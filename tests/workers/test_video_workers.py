"""A video worker reached over gRPC leaves a real server as it found it."""

import asyncio
import json

import pytest

from bireme.errors import RequestError
from bireme.launch.tritonserver import start_server
from bireme.workers.video import VideoWorkers


async def refused(address, count):
    workers = VideoWorkers(30, address)
    for _ in range(count):
        with pytest.raises(RequestError, match="prompt: missing"):
            async for _ in workers.generate("video_diffusion", {"prompt": b""}):
                pass
    await workers.close()


@pytest.mark.server
def test_a_server_that_has_refused_ends_at_once(monkeypatch):
    """Triton 2.51 goes on counting a stream that was cancelled after its end, and waits for it in vain."""
    monkeypatch.setenv("BIREME_OVERRIDE", json.dumps({"workers": {"video_diffusion": {"engine": "mocker"}}}))
    with start_server("recipes/tiny-video") as server:
        asyncio.run(refused(server.grpc, 200))
        assert server.stop() == 0
