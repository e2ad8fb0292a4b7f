"""A model whose weights lie in memory that engines share: filled once, then mapped, never copied.

The table says where each parameter and buffer lies. Weights of a layer's projections follow each other, so that what
`decoder_weights` joins is one matrix already, in every engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from bireme.engines.memory.client import WeightsHold
from bireme.engines.torch.weights.checkpoint import Checkpoint, choose_dtype, load_model, model_class, read_model
from bireme.engines.torch.weights.kept_experts import keep_experts
from bireme.engines.torch.weights.lean_imports import without_compiler, without_symbols
from bireme.engines.torch.weights.stored_linear import store_projections
from bireme.engines.torch.weights.weight_memory import WeightMemory, create_sealable, seal, weight_memory
from bireme.errors import UnavailableError, one_line

logger = logging.getLogger("bireme.engines.torch")
_ALIGNMENT = 256  # of each tensor, in bytes
_FORMAT = 3  # of table, arrangement, and what packed bytes mean


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    names: tuple[str, ...]  # several: tied
    dtype: str
    shape: tuple[int, ...]
    begin: int  # in bytes

    @property
    def num_bytes(self) -> int:
        return cast(int, _dtype(self.dtype).itemsize * torch.Size(self.shape).numel())


class SharedModel:
    """What `load_shared` returns: the model, and the hold that its engine has on the weights."""

    def __init__(self, model: Any, hold: WeightsHold | None, num_bytes: int, load_s: float, attach_s: float) -> None:
        self.model, self.hold = model, hold  # None: the weights are the engine's own
        self.num_bytes, self.load_s, self.attach_s = num_bytes, load_s, attach_s

    @property
    def is_shared(self) -> bool:
        return self.hold is not None

    @property
    def has_loaded(self) -> bool:
        """Whether this engine has read the weights itself."""
        return self.load_s > 0


def load_own(checkpoint: Checkpoint, dtype: str, device: torch.device) -> SharedModel:
    """Load weights that are this engine's alone. Raises ConfigError."""
    began = time.monotonic()
    return SharedModel(load_model(checkpoint, dtype, device), None, 0, time.monotonic() - began, 0.0)


def load_shared(
    checkpoint: Checkpoint, dtype: str, device: torch.device, hold: WeightsHold, wait_s: float
) -> SharedModel:
    """Map the weights, or fill them for the others. Where that can't be the engine has its own, and the log says why.

    Raises ConfigError for a checkpoint that can't be loaded.
    """
    began = time.monotonic()
    try:
        granted, descriptors = hold.attach(wait_s)
        memory = weight_memory(device)
        if granted.role == "map":
            model = make_skeleton(checkpoint, dtype)
            table = _read_table(descriptors[1])
            put_in(model, table, memory.map(descriptors[0], granted.num_bytes))
            return SharedModel(model, hold, granted.num_bytes, 0.0, time.monotonic() - began)
    except (UnavailableError, OSError, RuntimeError) as error:
        hold.close()
        logger.warning("weights_not_shared reason=%s", one_line(error))
        return load_own(checkpoint, dtype, device)
    began = time.monotonic()
    model = read_model(checkpoint, dtype, device)
    try:
        num_bytes = _fill(model, memory, hold, began)
    except (UnavailableError, OSError, RuntimeError) as error:
        hold.close()
        logger.warning("weights_not_shared reason=%s", one_line(error))
        return SharedModel(model.to(device), None, 0, time.monotonic() - began, 0.0)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was copied from
    return SharedModel(model, hold, num_bytes, time.monotonic() - began, 0.0)


def weights_id(checkpoint: Checkpoint, dtype: str, device: torch.device) -> str:
    """Return a name that is equal where the same weights lie on the same device."""
    import transformers  # as lean_imports left it

    place = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
    own = choose_dtype(dtype, checkpoint.config)
    parts = (
        checkpoint.digest,
        len(checkpoint.shards),
        checkpoint.quantization.method if checkpoint.quantization is not None else "plain",
        "kept" if checkpoint.keeps_experts else "",
        own,
        place,
        torch.__version__,
        transformers.__version__,
        _FORMAT,
    )
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def make_skeleton(checkpoint: Checkpoint, dtype: str) -> Any:
    """Return the model without memory for its tensors."""
    with without_compiler(), without_symbols(), torch.device("meta"):
        model = model_class(checkpoint).from_config(checkpoint.config, dtype=choose_dtype(dtype, checkpoint.config))
        if checkpoint.stored_as is not None:
            store_projections(model, checkpoint.stored_as, torch.device("meta"), plain=checkpoint.plain)
        if checkpoint.keeps_experts:
            keep_experts(model)
    return model.eval().requires_grad_(False)


def arrange(model: Any) -> tuple[list[SharedTensor], int]:
    """Return where each tensor of the model is to lie, and how many bytes that takes. Raises UnavailableError."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in _tensors(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    blocks: dict[str, int] = {}  # by first appearance: model.layers.0.self_attn, ...
    for own in names.values():
        blocks.setdefault(_block(own[0]), len(blocks))
    table, end = [], 0
    for key in sorted(tensors, key=lambda key: (blocks[_block(names[key][0])], *_leaf(names[key][0]))):
        tensor = tensors[key]
        shared = SharedTensor(tuple(names[key]), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end)
        table.append(shared)
        end += -(-shared.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return table, max(end, _ALIGNMENT)


def put_in(model: Any, table: list[SharedTensor], memory: Tensor) -> None:
    """Give the model the tensors that lie in `memory`. Raises UnavailableError where the table is another model's."""
    expected = {name: tensor.shape for name, tensor in _tensors(model)}
    found = {name: torch.Size(shared.shape) for shared in table for name in shared.names}
    if different := [name for name in {**expected, **found} if expected.get(name) != found.get(name)]:
        raise UnavailableError(f"the table of the shared weights is another model's: {sorted(different)[0]}")
    for shared in table:
        end = shared.begin + shared.num_bytes
        if not 0 <= shared.begin <= end <= len(memory):
            raise UnavailableError(f"{shared.names[0]} lies at {shared.begin} to {end} of {len(memory)} bytes")
        tensor = memory[shared.begin : end].view(_dtype(shared.dtype)).view(shared.shape)
        _set(model, shared.names, tensor)
    for name, module in model.named_modules():
        if stray := [attribute for attribute, value in vars(module).items() if isinstance(value, Tensor)]:
            raise UnavailableError(f"{name}.{stray[0]} is a tensor that no table of weights has")


def _set(model: Any, names: Iterable[str], tensor: Tensor) -> None:
    """Let parameters or buffers of these names be the tensor."""
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    for name in names:
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        if leaf in owner._parameters:
            owner._parameters[leaf] = parameter
        else:
            owner._buffers[leaf] = tensor


def _fill(model: Any, memory: WeightMemory, hold: WeightsHold, began: float) -> int:
    """Move the model's tensors into shared memory and hand that over; return its bytes."""
    table, num_bytes = arrange(model)
    with contextlib.ExitStack() as undo:
        descriptor, written = memory.create(num_bytes)
        undo.callback(os.close, descriptor)
        described = _write_table(table)
        undo.callback(os.close, described)
        by_name = dict(_tensors(model))
        for shared in table:
            source = by_name[shared.names[0]].detach().contiguous().reshape(-1)
            if shared.num_bytes:
                written[shared.begin : shared.begin + shared.num_bytes].view(source.dtype).copy_(source)
        put_in(model, table, memory.seal(descriptor, written))
        undo.pop_all()  # they are the hold's now
    hold.publish((descriptor, described), num_bytes, time.monotonic() - began)
    return num_bytes


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, those that no checkpoint has included, tied ones under each name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _block(name: str) -> str:
    return name.rsplit(".", 2)[0]


def _leaf(name: str) -> tuple[bool, str]:
    """Return what orders the tensors of a block: weights first, then what has the same name in each module."""
    leaf = name.rpartition(".")[2]
    return leaf != "weight", leaf


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnavailableError(f"the table of the shared weights has the dtype {name!r}")
    return dtype


def _write_table(table: list[SharedTensor]) -> int:
    data = msgspec.msgpack.encode(table)
    descriptor = create_sealable(len(data))
    os.pwrite(descriptor, data, 0)
    seal(descriptor)
    return descriptor


def _read_table(descriptor: int) -> list[SharedTensor]:
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    try:
        return msgspec.msgpack.decode(data, type=list[SharedTensor])
    except (msgspec.MsgspecError, ValueError) as error:
        raise UnavailableError(f"the table of the shared weights can't be read: {error}") from error
