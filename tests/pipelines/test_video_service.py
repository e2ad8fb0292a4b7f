"""Which video worker a request goes to, over workers that the test plays."""

import asyncio
import json

import msgspec
import numpy as np
import pytest

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.errors import EngineLostError, RequestError, ResourceExhaustedError, UnavailableError
from bireme.metrics import Registry
from bireme.observability.traces import Traces
from bireme.pipelines.video import Video
from bireme.pipelines.video_service import VideoService
from bireme.types import Cancelled, Inputs, RequestInfo, StageContext
from bireme.video.rules import RequestedVideo
from bireme.video.wire import Details
from tests.observability.span_trees import check_tree, shown

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ASK = RequestedVideo(prompt="x")
DETAILS = msgspec.json.encode(Details(size="64x64", seed=1, steps=2, output_format="mp4"))
ACCEPTED = {"details": np.array([DETAILS], object)}


class Workers:
    """Each worker's answers: tensors, or an error in their place. Keeps who was asked."""

    def __init__(self, **answers):
        self.answers, self.asked, self.go_on = answers, [], asyncio.Event()
        self.go_on.set()

    async def generate(self, worker, tensors):
        self.asked.append(worker)
        for answer in self.answers.get(worker, [ACCEPTED, made(worker)]):
            await self.go_on.wait()
            if isinstance(answer, Exception):
                raise answer
            yield answer

    async def close(self):
        pass


def made(worker):
    seconds = np.array([0.5], np.float32)
    return ACCEPTED | {"video": np.array([worker.encode()], object), "inference_time_s": seconds}


def service(workers, **limits):
    entry = {"engine": "mocker", "replicas": 2}
    recipe = convert({"model": "none", "workers": {"video_diffusion": entry}, "limits": limits}, Recipe, "test")
    return VideoService(recipe, workers, Registry("video"))


async def run(service):
    news = []
    result = await service.run(ASK, news.append)
    return result.parts, news


async def test_requests_at_once_go_to_different_workers():
    workers = Workers()
    workers.go_on.clear()
    one = service(workers)
    running = asyncio.gather(run(one), run(one))
    await asyncio.sleep(0)
    workers.go_on.set()
    assert sorted(parts for parts, _ in await running) == [[b"video_diffusion"], [b"video_diffusion_1"]]


@pytest.mark.parametrize("error", [UnavailableError("it is down"), ResourceExhaustedError("its queue is full")])
async def test_a_worker_that_takes_no_request_is_passed_over(error):
    workers = Workers(video_diffusion=[error])
    one = service(workers)
    for _ in range(2):  # though the one that is down is always the idle one
        assert (await run(one))[0] == [b"video_diffusion_1"]
    assert workers.asked == ["video_diffusion", "video_diffusion_1"] * 2


async def test_the_last_worker_s_error_is_the_request_s():
    one = service(Workers(video_diffusion=[UnavailableError("first")], video_diffusion_1=[UnavailableError("second")]))
    with pytest.raises(UnavailableError, match="second"):
        await run(one)


@pytest.mark.parametrize("answers", [[ACCEPTED, EngineLostError("it died")], [RequestError("size: no")]])
async def test_work_that_has_begun_and_requests_that_are_wrong_are_not_given_to_another(answers):
    workers = Workers(video_diffusion=answers)
    with pytest.raises(type(answers[-1])):
        await run(service(workers))
    assert workers.asked == ["video_diffusion"]


async def test_a_worker_that_ends_without_a_result_has_lost_the_request():
    with pytest.raises(EngineLostError, match="without a result"):
        await run(service(Workers(video_diffusion=[ACCEPTED])))


async def test_more_requests_than_the_limit_are_refused():
    workers = Workers()
    workers.go_on.clear()
    one = service(workers, max_concurrent_requests=1)
    running = asyncio.ensure_future(run(one))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="limits.max_concurrent_requests"):
        await run(one)
    workers.go_on.set()
    assert (await running)[0] == [b"video_diffusion"] and (await run(one))[0]


async def test_a_client_of_the_video_model_has_a_tree_here(tmp_path):
    entry = {"engine": "mocker", "replicas": 2}
    tree = {"model": "none", "workers": {"video_diffusion": entry}, "video": {"folder": str(tmp_path)}}
    recipe, metrics = convert(tree, Recipe, "test"), Registry("video")
    stage, read = Video(Workers(video_diffusion=[UnavailableError("it is down")])), []
    await stage.start(StageContext("video", recipe, None, metrics))
    stage._traces = Traces(metrics, 1.0)
    stage._traces.subscribe(read.append)
    for request in ({"prompt": "x"}, {"prompt": "x", "size": "64x64"}):
        given = {"request": np.array([json.dumps(request).encode()], object)}
        inputs = Inputs(given, RequestInfo(parameters={"traceparent": TRACEPARENT}))
        await stage.handle(inputs, lambda response: None, Cancelled())
    await stage.stop()
    assert [shown(trace) for trace in read] == [["video", "  video", "  video"]] * 2
    for trace in read:
        check_tree(trace)
        assert trace.trace_id == TRACEPARENT.split("-")[1] and trace.root.error == ""
        assert [span.error.partition(":")[0] for span in trace.spans] == ["", "UNAVAILABLE", ""]
