"""A video model that a frontend serves: its recipe, its workers on one tritonserver, its results, its jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from bireme.config import Recipe
from bireme.errors import ConfigError
from bireme.metrics import Registry
from bireme.openai.http.error_replies import HttpError
from bireme.openai.model_kinds import VIDEO, ModelKind, wrong_endpoint
from bireme.openai.video.job_store import JobStore
from bireme.pipelines.video_service import Delivery, VideoService, VideoWorker
from bireme.video.files import FileStore, open_files, video_folder
from bireme.workers.grpc_tls import GrpcTls
from bireme.workers.video import VideoWorkers


class ServedVideo:
    """One tritonserver's video model."""

    def __init__(
        self, recipe: Recipe, workers: VideoWorker, files: FileStore, jobs: JobStore, metrics: Registry, url: str
    ) -> None:
        self.recipe, self.workers, self.files, self.jobs = recipe, workers, files, jobs
        self.name = recipe.video_name
        self.created = int(time.time())
        self.service = VideoService(recipe, workers, metrics)
        self.delivery = Delivery(files, recipe.video.public_url or url)

    async def is_ready(self) -> bool:
        for worker in self.recipe.replicas("video_diffusion"):
            if await self.workers.is_ready(worker):
                return True
        return False

    async def close(self) -> None:
        self.jobs.close()
        await self.service.close()


def connect_video(recipe: Recipe, address: str, metrics: Registry, url: str) -> ServedVideo:
    """Return a model at a tritonserver's gRPC address. `url`: the beginning of this frontend's. Raises ConfigError."""
    workers = VideoWorkers(recipe.pipeline.stall_timeout_s, address, GrpcTls.of(recipe))
    return ServedVideo(recipe, workers, open_files(recipe), JobStore(video_folder(recipe)), metrics, url)


class VideoModels:
    """All video models of a frontend, by name."""

    def __init__(self, models: list[ServedVideo]) -> None:
        self._models: dict[str, ServedVideo] = {}
        self._others: Mapping[str, ModelKind] = {}
        for model in models:
            if model.name in self._models:
                raise ConfigError(f"two recipes serve the videos of {model.name}; set video.served_model_name in one")
            self._models[model.name] = model

    def know_others(self, names: Mapping[str, ModelKind]) -> None:
        """Take what the models of other kinds are called, for errors."""
        self._others = names

    def __iter__(self) -> Iterator[ServedVideo]:
        return iter(self._models.values())

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def get(self, name: str) -> ServedVideo:
        """Return the model; without a name the only one. Raises HttpError."""
        if name in self._others and name not in self._models:
            raise wrong_endpoint(name, self._others[name], VIDEO)
        if not self._models:
            raise HttpError(404, "no video model is served here; GET /v1/models lists what there is", code="not_found")
        if not name and len(self._models) == 1:
            return next(iter(self))
        if not name:
            raise HttpError(400, f"model: missing; send one of {', '.join(self._models)}", code="missing_model")
        if name not in self._models:
            raise HttpError(
                404, f"The model `{name[:100]}` makes no videos here; send one of {', '.join(self._models)}",
                code="model_not_found",
            )  # fmt: skip
        return self._models[name]
