"""What steps take, as a file in the run folder: read at the worker's next start, by the simulator, and by people."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch

from bireme.engines.torch.scheduling.step_costs import StepCosts, StepTime
from bireme.errors import one_line
from bireme.sizing.step_times import FORMAT

logger = logging.getLogger("bireme.engines.torch")
_EVERY_S = 30.0
_MOST_BYTES = 1 << 20  # ten times what as many points as are kept take


class StepTimesRecord(msgspec.Struct):
    format: str
    engine: str
    machine: str
    points: list[StepTime]
    subject: str = ""  # hash of the model and settings that it is of


class StepTimesFile:
    """Written by a thread of its own, never by the engine's."""

    def __init__(self, path: Path | None, device: torch.device, *subject: Any) -> None:
        """`path`: None keeps nothing. `subject`: what the times depend on, beside the machine."""
        self._path = path
        self._machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        self._subject = hashlib.sha256(" ".join(map(str, subject)).encode()).hexdigest()
        self._num_written = 0
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def read(self) -> list[StepTime]:
        """Return what an earlier life has kept of the same model, settings and machine."""
        if self._path is None:
            return []
        try:
            with self._path.open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES} bytes")
            found = msgspec.json.decode(content, type=StepTimesRecord)
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            logger.warning("step_times_not_read reason=%s: they are measured anew", one_line(error))
            return []
        if (found.format, found.machine, found.subject) != (FORMAT, self._machine, self._subject):
            return []
        return found.points

    def start(self, costs: StepCosts) -> None:
        if self._path is not None:
            self._thread = threading.Thread(target=self._run, args=(costs,), name="step-times", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what is new."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, costs: StepCosts) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_closing.wait(_EVERY_S)
            if costs.num_landed != self._num_written:
                self._num_written = costs.num_landed
                self._write(costs)

    def _write(self, costs: StepCosts) -> None:
        assert self._path is not None
        draft = self._path.with_name(f".{self._path.name}-{os.getpid()}")
        record = StepTimesRecord(FORMAT, "torch", self._machine, costs.points(), self._subject)
        try:
            draft.write_bytes(msgspec.json.encode(record))
            draft.replace(self._path)
        except OSError as error:  # the disk is full, the folder is gone
            draft.unlink(missing_ok=True)
            logger.warning("step_times_not_kept reason=%s: the next start measures anew", one_line(error))
