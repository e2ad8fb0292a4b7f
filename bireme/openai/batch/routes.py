"""The paths of files and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from bireme.config import FrontendConfig
from bireme.metrics import Registry
from bireme.openai.batch.batches import PATH as BATCHES_PATH
from bireme.openai.batch.batches import Batches
from bireme.openai.batch.files import PATH as FILES_PATH
from bireme.openai.batch.files import FilesAndBatches, FilesApi
from bireme.openai.batch.line_gate import Endpoint
from bireme.openai.call_traces import CallTraces
from bireme.openai.http.call import Handler, Post
from bireme.openai.keys import ApiKeys
from bireme.openai.store_thread import StoreThread


class FileRoutes:
    """`start` and `stop` on the loop that serves. With frontend.files.max_files: 0 there are no such paths."""

    def __init__(
        self, config: FrontendConfig, folder: Path | None, endpoints: Mapping[str, Endpoint],
        keys: Callable[[], ApiKeys | None], metrics: Registry, lines_rest: bool, traces: CallTraces | None = None,
    ) -> None:  # fmt: skip
        """`folder`: None: one that goes with this process. `endpoints`: of batches, by their paths. `lines_rest`: all
        engines let lines rest beside other requests.
        """
        self._is_on, self._is_shared = config.files.max_files > 0, folder is not None
        self.store = StoreThread(folder, lambda place: FilesAndBatches(place, config), "files")
        self._files = FilesApi(config, self.store)
        self._batches = Batches(config, self.store, self._files, endpoints, keys, metrics, lines_rest, traces)
        self.gate = self._batches.gate

    def routes(
        self, limited: Callable[[Handler], Handler], with_body: Callable[[Post], Handler]
    ) -> dict[str, dict[str, Handler]]:
        if not self._is_on:
            return {}
        return {
            FILES_PATH: {"POST": limited(self._files.upload), "GET": self._files.list_files},
            BATCHES_PATH: {"POST": with_body(self._batches.create), "GET": self._batches.list_batches},
        }

    def match(self, path: str) -> dict[str, Handler] | None:
        files: dict[str, dict[str, Handler]] = {
            "": {"GET": self._files.show, "DELETE": self._files.delete},
            "content": {"GET": self._files.content},
        }
        batches: dict[str, dict[str, Handler]] = {
            "": {"GET": self._batches.show},
            "cancel": {"POST": self._batches.cancel},
        }
        for beginning, parts in ((FILES_PATH, files), (BATCHES_PATH, batches)):
            name, _, part = path.removeprefix(f"{beginning}/").partition("/")
            if self._is_on and path.startswith(f"{beginning}/") and name:
                return parts.get(part)
        return None

    def start(self) -> None:
        if self._is_on and self._is_shared:
            self._batches.start()

    async def stop(self) -> None:
        await self._batches.stop()
        await self.store.close()
