"""The paths of videos and pictures, and the sweeping of their results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from bireme.errors import UnavailableError, drop_frames
from bireme.metrics import Registry
from bireme.openai.http.call import Handler
from bireme.openai.http.file_reply import Files
from bireme.openai.http.form import JSON_OR_FORM
from bireme.openai.video.images import Images
from bireme.openai.video.jobs import sweep
from bireme.openai.video.served_video import VideoModels
from bireme.openai.video.videos import PATH, Videos
from bireme.pipelines.video_service import FILES_PATH

logger = logging.getLogger("bireme.openai")
_SWEEP_S = 30.0

WithBody = Callable[..., Handler]  # (post, kinds of body)


class VideoRoutes:
    """Made before the loop runs; `start` and `stop` on it. Without video models there are no such paths."""

    def __init__(self, models: VideoModels, metrics: Registry, comment_interval_s: float) -> None:
        self._models, self._metrics = models, metrics
        self._videos = Videos(models, comment_interval_s)
        self._files = Files([model.files for model in models], FILES_PATH)
        self._sweeper: asyncio.Task[None] | None = None

    def routes(self, with_body: WithBody) -> dict[str, dict[str, Handler]]:
        if not list(self._models):
            return {}
        return {
            PATH: {"POST": with_body(self._videos.create, JSON_OR_FORM), "GET": self._videos.list_jobs},
            f"{PATH}/generations": {"POST": with_body(self._videos.generate)},
            "/v1/images/generations": {"POST": with_body(Images(self._models).generate)},
        }

    def match(self, path: str) -> dict[str, Handler] | None:
        if not list(self._models):
            return None
        if path.startswith(FILES_PATH):
            return {"GET": self._files.get}
        if not path.startswith(f"{PATH}/"):
            return None
        if path.endswith("/content"):
            return {"GET": self._videos.content}
        if "/" in path[len(PATH) + 1 :]:
            return None
        return {"GET": self._videos.show, "DELETE": self._videos.delete}

    def is_open(self, path: str) -> bool:
        return path.startswith(FILES_PATH)

    async def start(self) -> None:
        if list(self._models):
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._videos.jobs.stop()
        for model in self._models:
            await model.close()

    async def _sweep(self) -> None:
        while True:
            for model in self._models:
                try:
                    num_bytes, counts = await model.store.do(sweep, model.recipe.video)
                except UnavailableError as error:  # the store has told why
                    drop_frames(error)
                    continue
                except Exception:
                    logger.exception("sweep_failed model=%s", model.name)
                    continue
                self._metrics.set("bireme_video_files_bytes", num_bytes)
                for status, count in counts.items():
                    self._metrics.set("bireme_video_jobs", count, status)
            await asyncio.sleep(_SWEEP_S)
