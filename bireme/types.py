"""The shape of a stage call: tensors in, responses out. Knows neither Triton nor torch.

A stage never waits for a client: `send` appends to the stream's buffer and returns at once, from any thread; a sender
thread of the adapter merges what waits there and sends it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from bireme.specs import ModelSpec

if TYPE_CHECKING:
    from bireme.config import Recipe, WorkerEntry
    from bireme.metrics import Registry

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]
Tensors = Mapping[str, Array]  # BYTES tensors are object arrays of bytes


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Triton's data of a request beside its tensors."""

    request_id: str = ""  # the client's; never used to find another client's request
    parameters: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    timeout_ms: int = 0  # the client's own limit, from now; 0: none
    outputs: frozenset[str] = frozenset()  # requested output names; empty: all


class Inputs(dict[str, Array]):
    """Input tensors as the adapter hands them to a stage, with their RequestInfo."""

    info: RequestInfo

    def __init__(self, tensors: Mapping[str, Array], info: RequestInfo | None = None) -> None:
        super().__init__(tensors)
        self.info = info or RequestInfo()


def info_of(inputs: Tensors) -> RequestInfo:
    """Return the RequestInfo that came with `inputs`; an empty one for plain mappings."""
    return inputs.info if isinstance(inputs, Inputs) else RequestInfo()


class Response(Protocol):
    """One response on its way to a client.

    It may have four more attributes, all optional:
        `num_bytes: int`     its size in the buffer of a slow reader (size_of guesses otherwise);
        `is_urgent: bool`    true: it goes before other streams' middle responses;
        `is_last: bool`      true: nothing follows, so the final flag travels with it (one send fewer);
        `parameters: dict`   response parameters, dropped on a Triton before 25.02, so never the only place.
    """

    def merge(self, later: Response) -> Response | None:
        """Return one response for both, or None when they must be sent apart."""

    def tensors(self) -> Tensors:
        """Return the output tensors; called once, on a sender thread."""


@dataclass(frozen=True, slots=True)
class TensorResponse:
    """Plain tensors that never merge: unary answers."""

    outputs: Tensors

    @property
    def num_bytes(self) -> int:
        return sum(_array_bytes(array) for array in self.outputs.values())

    def merge(self, later: Response) -> Response | None:
        return None

    def tensors(self) -> Tensors:
        return self.outputs


_UNSIZED_BYTES = 256  # a response of a few tokens with its objects


def size_of(response: Response) -> int:
    """Return the bytes that a response holds while it waits to be sent."""
    return int(getattr(response, "num_bytes", _UNSIZED_BYTES))


def _array_bytes(array: Array) -> int:
    if array.dtype != np.object_:
        return array.nbytes
    return sum(len(item) for item in array.reshape(-1).tolist())


Send = Callable[[Response], None]  # thread-safe; never blocks; ignored after the end of the request


class Cancelled:
    """Set once, by the adapter, when the client is gone. Thread-safe."""

    __slots__ = ("_callbacks", "_is_set", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._callbacks: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return self._is_set

    def on_set(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when set, or now if it is set already. It must be quick and not raise."""
        with self._lock:
            if not self._is_set:
                self._callbacks.append(callback)
                return
        callback()

    def set(self) -> None:
        with self._lock:
            if self._is_set:
                return
            self._is_set = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


@dataclass(slots=True)
class StageContext:
    """What a stage gets at start."""

    model_name: str  # Triton's name of this model: `decode`, `decode_1`, ...
    recipe: Recipe
    entry: WorkerEntry | None  # None: not in the recipe; the stage answers UNAVAILABLE
    metrics: Registry
    # Unary BLS, model and inputs -> outputs; raises errors.py. None outside Triton.
    call_async: Callable[[str, Tensors], Awaitable[Tensors]] | None = None
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("bireme"))


class Stage(Protocol):
    """One Triton model's behavior.

    1. `start` once, before the model is ready; may take as long as loading takes; raises ConfigError.
    2. `handle` once a request, as a task of the adapter's loop; what it raises becomes the error
       response; when it returns, the request ends (the adapter sends the final flag).
    3. `stop` once, also after a failed start.
    `is_ready` false turns the model not-ready where Triton asks (26.03 and later).
    """

    spec: ClassVar[ModelSpec]

    async def start(self, context: StageContext) -> None: ...

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None: ...

    async def stop(self) -> None: ...

    def is_ready(self) -> bool: ...
