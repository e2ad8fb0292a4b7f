"""The logits_processor model: a JSON list of registered processors, applied to logits with their history.

For use on its own and as the reference; never on the token path, where the same classes run inside the engine. They are
torch code, so they run in a child process that the first request starts (bireme/engines/logits). This module turns
tensors into a checked job and back.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from bireme.config import Limits, Recipe
from bireme.engines.logits.client import LogitsClient
from bireme.errors import ConfigError, RequestCancelledError, RequestError
from bireme.logits.application import Ids, Logits, LogitsJob
from bireme.messages import ProcessorCall
from bireme.sampling import nearest
from bireme.specs import LOGITS_PROCESSOR, ModelSpec
from bireme.types import Array, Cancelled, Send, StageContext, TensorResponse, Tensors, info_of

_FORM = '[{"name": ..., "args": {...}}]'


class LogitsProcessor:
    """The stage; needs no worker entry, so it serves every recipe."""

    spec: ClassVar[ModelSpec] = LOGITS_PROCESSOR

    async def start(self, context: StageContext) -> None:
        self._limits = context.recipe.limits
        self._eos_ids = await asyncio.to_thread(eos_ids_of, context.recipe)
        self._client = LogitsClient(context.recipe, context.logger)

    async def stop(self) -> None:
        if hasattr(self, "_client"):
            await asyncio.to_thread(self._client.stop)

    def is_ready(self) -> bool:
        return hasattr(self, "_client")

    async def handle(self, inputs: Tensors, send: Send, cancelled: Cancelled) -> None:
        job = parse_job(inputs, self._limits, self._eos_ids)
        future = self._client.submit(job)
        cancelled.on_set(lambda: _cancel(future))  # a running job goes on to its end: milliseconds
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if cancelled and future.cancelled():
                raise RequestCancelledError("the client is gone") from None
            raise
        rows = np.frombuffer(bytearray(result), np.float32).reshape(job.num_rows, job.vocab_size)
        send(TensorResponse({"logits": rows}))


def _cancel(future: Future[bytes]) -> None:
    future.cancel()


def parse_job(inputs: Tensors, limits: Limits, eos_ids: tuple[int, ...] = ()) -> LogitsJob:
    """Check a request's tensors. Raises RequestError."""
    for name in inputs:
        if LOGITS_PROCESSOR.input(name) is None:
            known = [tensor.name for tensor in LOGITS_PROCESSOR.inputs]
            raise RequestError(f"{name}: logits_processor has no such input{nearest(name, known)}")
    logits = _logits(inputs, limits)
    num_rows, vocab_size = logits.shape
    processors = _processors(inputs, limits)
    histories = _histories(inputs, num_rows, vocab_size)
    return LogitsJob(
        processors=processors,
        logits=logits.tobytes(),
        vocab_size=vocab_size,
        histories=tuple(history.tobytes() for history in histories),
        num_prompt_tokens=_num_prompt_tokens(inputs, histories),
        eos_ids=_end_ids(inputs, vocab_size, eos_ids),
        request_id=info_of(inputs).request_id,
    )


def eos_ids_of(recipe: Recipe) -> tuple[int, ...]:
    """Return the model's end-of-sequence ids as its engine knows them; () where there is no model folder."""
    try:
        folder = Path(recipe.model_path)
    except ConfigError:  # a mocker's model need not exist
        return ()
    for name in ("generation_config.json", "config.json"):
        ids = _json_file(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _json_file(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _logits(inputs: Tensors, limits: Limits) -> Logits:
    array = inputs.get("logits")
    if array is None:
        raise RequestError("logits: missing; send FP32 of shape [rows, vocabulary]")
    if array.dtype != np.float32 or array.ndim not in (1, 2) or array.size == 0:
        raise RequestError(f"logits: {array.dtype} of shape {list(array.shape)}; send FP32, [rows, vocabulary]")
    if array.nbytes > limits.max_logits_bytes:
        raise RequestError(f"logits: {array.nbytes} bytes; limits.max_logits_bytes is {limits.max_logits_bytes}")
    return np.atleast_2d(array).astype(np.float32, copy=False)


def _processors(inputs: Tensors, limits: Limits) -> tuple[ProcessorCall, ...]:
    array = inputs.get("processors")
    if array is None or array.size != 1:
        raise RequestError(f"processors: one JSON list is needed: {_FORM}")
    item: Any = array.reshape(-1)[0]
    try:
        calls = msgspec.json.decode(item, type=tuple[ProcessorCall, ...])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"processors: {error}; send a JSON list {_FORM}") from error
    if len(calls) > limits.max_logits_processors:
        limit = limits.max_logits_processors
        raise RequestError(f"processors: {len(calls)} of them; limits.max_logits_processors is {limit}")
    return calls


def _histories(inputs: Tensors, num_rows: int, vocab_size: int) -> list[Ids]:
    """Cut input_ids into one history a row."""
    ids = _integers(inputs, "input_ids", np.zeros(0, np.int32))
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise RequestError(f"input_ids: {wrong[0]} is not in the vocabulary, 0 to {vocab_size - 1}")
    if num_rows > 1 and ids.size and "input_lengths" not in inputs:
        raise RequestError(f"input_lengths: missing; {num_rows} rows of logits share input_ids, send one length a row")
    lengths = _integers(inputs, "input_lengths", np.array([ids.size] + [0] * (num_rows - 1)))
    if lengths.size != num_rows or (lengths < 0).any() or int(lengths.sum(dtype=np.int64)) != ids.size:
        raise RequestError(
            f"input_lengths: {lengths.size} lengths, in all {lengths.sum(dtype=np.int64)}, for {num_rows} rows and"
            f" {ids.size} input_ids; send one length a row"
        )
    return [part.astype(np.int32) for part in np.split(ids, np.cumsum(lengths)[:-1])]


def _num_prompt_tokens(inputs: Tensors, histories: list[Ids]) -> tuple[int, ...]:
    counts = _integers(inputs, "num_prompt_tokens", np.zeros(len(histories), np.int64))
    if counts.size != len(histories):
        raise RequestError(f"num_prompt_tokens: {counts.size} values for {len(histories)} rows; send one a row")
    for count, history in zip(counts.tolist(), histories, strict=True):
        if not 0 <= count <= history.size:
            raise RequestError(f"num_prompt_tokens: {count} of a history of {history.size} tokens")
    return tuple(counts.tolist())


def _end_ids(inputs: Tensors, vocab_size: int, default: tuple[int, ...]) -> tuple[int, ...]:
    if "end_id" not in inputs:
        return tuple(token for token in default if 0 <= token < vocab_size)
    ids = tuple(_integers(inputs, "end_id", np.zeros(0)).tolist())
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise RequestError(f"end_id: {wrong[0]} is not in the vocabulary, 0 to {vocab_size - 1}")
    return ids


def _integers(inputs: Tensors, name: str, default: Array) -> Any:
    array = inputs.get(name)
    if array is None:
        return default
    if array.dtype.kind not in "iu" or array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1):
        raise RequestError(f"{name}: {array.dtype} of shape {list(array.shape)}; send INT32, [n]")
    return array.reshape(-1)
