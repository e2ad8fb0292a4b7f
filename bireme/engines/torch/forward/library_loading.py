"""What CUDA's libraries load at their first call, loaded while a start reads its model."""

from __future__ import annotations

import contextlib
import threading
from typing import Self

import torch


class LoadedLibraries:
    """Has a thread make small calls of what each step uses of torch: products, copies, norms.

    Each loads code of its own when it is first called, 0.2 s together, in which no other thread of Python has to wait.
    The thread's handle of cuBLAS goes to whoever makes the next product. A `with` statement ends when the thread has,
    also where the start fails in it: a process that exits with a thread in CUDA's libraries may crash in place of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=_call, args=(device,), name="libraries", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def _call(device: torch.device) -> None:
    # What is wrong the start itself meets, and tells.
    with contextlib.suppress(RuntimeError, TypeError), torch.inference_mode():
        x, weights = (torch.ones(rows, 512, dtype=torch.bfloat16, device=device) for rows in (40, 512))
        torch.mm(x, weights.t(), out_dtype=torch.float32)
        x.addmm_(x, weights.t())
        found = x[torch.arange(3, device=device)].float()
        float(((found - found.clone().fill_(float("nan"))).norm() / found.norm()).cpu())
