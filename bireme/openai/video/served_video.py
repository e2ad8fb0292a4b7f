"""A video model that a frontend serves: its recipe, its workers on one tritonserver, its results, its jobs."""

from __future__ import annotations

import time

from bireme.config import Recipe
from bireme.metrics import Registry
from bireme.openai.model_kinds import VIDEO, ModelsByName
from bireme.openai.store_thread import StoreThread
from bireme.openai.video.job_store import FilesAndJobs
from bireme.pipelines.video_request import VideoRequest
from bireme.pipelines.video_service import Delivery, VideoService, VideoWorker
from bireme.video.files import FileStore, open_files, video_folder
from bireme.workers.grpc_tls import GrpcTls
from bireme.workers.video import VideoWorkers


class ServedVideo:
    def __init__(self, recipe: Recipe, workers: VideoWorker, files: FileStore, metrics: Registry, url: str) -> None:
        self.recipe, self.workers, self.files = recipe, workers, files
        self.name = recipe.video_name
        self.store = StoreThread(video_folder(recipe), lambda place: FilesAndJobs(place, files), f"videos-{self.name}")
        self.created = int(time.time())
        self.service = VideoService(recipe, workers, metrics)
        self.delivery = Delivery(files, recipe.video.public_url or url)

    def check(self, request: VideoRequest) -> None:
        """Raises RequestError for a form that can't be delivered here, and UnavailableError for one that can't now."""
        self.delivery.check(request)
        if request.response_format != "b64_json":
            self.store.require()

    async def is_ready(self) -> bool:
        for worker in self.recipe.replicas("video_diffusion"):
            if await self.workers.is_ready(worker):
                return True
        return False

    async def close(self) -> None:
        await self.store.close()
        await self.service.close()


def connect_video(recipe: Recipe, address: str, metrics: Registry, url: str) -> ServedVideo:
    """Return a model at a tritonserver's gRPC address. `url`: the beginning of this frontend's."""
    workers = VideoWorkers(recipe.pipeline.stall_timeout_s, address, GrpcTls.of(recipe))
    return ServedVideo(recipe, workers, open_files(recipe), metrics, url)


class VideoModels(ModelsByName[ServedVideo]):
    kind = VIDEO
