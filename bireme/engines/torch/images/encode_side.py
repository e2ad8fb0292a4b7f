"""What engines that may have the vision tower share: encode requests go to its jobs, unless the engine drains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bireme.engines.base import EngineContext, RequestKey
from bireme.engines.child.validate import check_open
from bireme.messages import EncodeRequest

if TYPE_CHECKING:
    from bireme.engines.torch.images.encode_jobs import EncodeJobs


class EncodeSide:
    """A PictureEngine's own methods."""

    _context: EngineContext
    _jobs: EncodeJobs | None = None  # of the engine that has the vision tower, from its start on
    _is_draining = False
    _is_stopping = False

    def encode(self, key: RequestKey, request: EncodeRequest) -> None:
        assert self._jobs is not None, "the gate lets no encode through to an engine without vision tower"
        check_open(self._context.worker, self._is_draining or self._is_stopping)
        self._jobs.submit(key, request)

    def release(self, handles: tuple[str, ...]) -> None:
        assert self._jobs is not None, "the gate lets no release through to an engine without vision tower"
        self._jobs.service.release(handles)
