"""A frontend of video models, over a worker that a test drives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.errors import BiremeError
from bireme.metrics import Registry
from bireme.observability.traces import Traces
from bireme.openai.app import Frontend
from bireme.openai.keys import ApiKeys
from bireme.openai.text.served_model import Models, ServedModel
from bireme.openai.video.served_video import ServedVideo, VideoModels
from bireme.video.files import open_files
from tests.openai.conftest import Bench

Start = Callable[..., Any]
DETAILS = {"size": "64x64", "seed": 1, "steps": 2, "output_format": "mp4", "num_frames": 8, "fps": 8, "seconds": 1.0}


class VideoScript:
    """A worker: accepts, then waits until the test says how it ends."""

    def __init__(self) -> None:
        self.refusal: BiremeError | None = None
        self.ends: list[asyncio.Future[bytes]] = []  # futures of the requests under way
        self.num_left = 0

    async def generate(self, worker: str, tensors: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if self.refusal is not None:
            raise self.refusal
        details = np.array([json.dumps(DETAILS).encode()], object)
        yield {"details": details}
        yield {name: np.array([value]) for name, value in (
            ("queue_position", 0), ("step", 1), ("total_steps", 2), ("eta_s", 0.5),
        )}  # fmt: skip
        end: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.ends.append(end)
        try:
            data = await end
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        yield {"details": details, "inference_time_s": np.array([0.5]), "video": np.array([data], object)}

    async def is_ready(self, worker: str) -> bool:
        return True

    async def close(self) -> None:
        return None

    async def begun(self, count: int = 1) -> None:
        async with asyncio.timeout(60):
            while len(self.ends) < count:
                await asyncio.sleep(0.01)


@pytest.fixture
async def start(tmp_path: Path, bench_of: Callable[[Frontend, Any], Bench]) -> AsyncIterator[Start]:
    """Return a function that starts a frontend of video models."""
    apps = []

    async def start(
        keys: ApiKeys | None = None,
        names: Sequence[str] = ("clips",),
        first: Path | None = None,
        texts: Sequence[ServedModel] = (),
        traces: Traces | None = None,
    ) -> Bench:
        """`first`: the folder of the first model; None: `tmp_path`."""
        metrics, worker, videos = Registry("frontend"), VideoScript(), list[ServedVideo]()
        for name in names:
            folder = tmp_path / name if videos else first or tmp_path
            tree = {"model": "none", "workers": {"video_diffusion": {"engine": "mocker"}}, "name": name}
            recipe = convert(tree | {"video": {"folder": str(folder)}}, Recipe, "test")
            videos.append(ServedVideo(recipe, worker, open_files(recipe), metrics, "http://here"))
        app = Frontend(Models(list(texts)), metrics, recipe.frontend, keys, videos=VideoModels(videos), traces=traces)
        await app.start()
        apps.append(app)
        return bench_of(app, worker)

    yield start
    for app in apps:
        await app.stop()
