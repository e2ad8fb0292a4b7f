"""What a launch takes of this machine's memory, worker by worker, and what to change where that is too much.

Refused is only what can't run: weights and processes beyond all there is. What may run, with luck, is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bireme.config import EngineConfig, Recipe
from bireme.engines.stub.environment import devices_of, gpu_neighbors
from bireme.engines.torch import native
from bireme.engines.torch.geometry import (
    DEQUANTIZE,
    NEWER_GPU,
    NO_FEW_BITS,
    OTHER_DTYPE,
    why_no_bfloat16,
    why_no_few_bits,
    why_no_fp8,
)
from bireme.engines.torch.weights.kv_schemes import is_of_kv_alone
from bireme.engines.torch.weights.limits import FP8, FP8_REMEDY, draft_config, why_no_fp8_kv
from bireme.engines.torch.weights.plain_modules import KEY, why_not_excluded
from bireme.errors import ConfigError
from bireme.gguf.folder import gguf_files
from bireme.gguf.head import read_head
from bireme.launch.footprint.config_fields import ConfigFields, UncountedError, read_config
from bireme.launch.footprint.decoder_shape import read_shape
from bireme.launch.footprint.engine_footprint import (
    GPU_CONTEXT_BYTES,
    EngineFootprint,
    EngineSizes,
    HeadSizes,
    Surroundings,
)
from bireme.launch.footprint.kept_bytes import kept_blocks
from bireme.launch.footprint.machine_memory import MachineMemory
from bireme.launch.footprint.weight_files import read_weight_files
from bireme.settings import EAGLE, NO_QUANT

# Measured by benchmarks/memory_estimate.py: torch, transformers and what an engine takes whatever its model.
ENGINE_PROCESS_BYTES = 400 << 20
STUB_BYTES = 60 << 20
_SERVER_BYTES = 150 << 20  # tritonserver and the frontend
_SURE = 0.9  # of what was counted: a launch that may fit is not refused
_SIZED_STAGES = ("prefill", "decode")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFootprint:
    """Of a stage's workers, which are alike."""

    stage: str
    count: int
    gpu: int | None  # the first one's; None: the CPU
    engine: EngineFootprint | None  # None: not known
    reason: str = ""  # why it is not known
    is_sure: bool = True  # weights may stay smaller than they are counted
    is_wrong: bool = False  # what it is counted from can't be served


@dataclass(frozen=True, slots=True, kw_only=True)
class FitProblem:
    key: str  # dotted, from the top of recipe.yaml
    value: str
    reason: str
    remedy: str
    is_error: bool

    def __str__(self) -> str:
        return "; ".join(filter(None, (f"{self.key}: {self.value}", self.reason, self.remedy)))


class LaunchFootprint:
    def __init__(self, recipe: Recipe, machine: MachineMemory, num_stubs: int) -> None:
        """Raises nothing: what can't be counted is said in the worker's `reason`."""
        self._recipe, self.machine, self._num_stubs = recipe, machine, num_stubs
        self.workers = [self._worker(stage) for stage, entry in recipe.workers.items() if entry.replicas]

    def lines(self) -> Iterator[str]:
        for worker in self.workers:
            where = "CPU" if worker.gpu is None else f"GPU {worker.gpu}"
            head = f"{worker.stage}: {worker.count} engine{'s' * (worker.count > 1)} on {where}"
            if worker.engine is None:
                yield f"{head}: {worker.reason}"
                continue
            one = worker.engine
            windows = ", ".join(
                f"{group.bytes_per_token:,} B/token in {f'windows of {group.window}' if group.window else 'all'}"
                for group in one.groups
            )
            load = f", while it loads {one.load // _MIB:,} MiB more" if one.load > one.pool + one.step else ""
            process = "" if worker.gpu is not None else f", process {ENGINE_PROCESS_BYTES // _MIB:,} MiB"
            yield (
                f"{head}, each: weights {one.weights // _MIB:,} MiB ({one.dtype}), KV pool {one.pool // _MIB:,} MiB"
                f" ({one.pool_tokens:,} tokens in {one.kv_dtype}; {windows}), largest step"
                f" {one.step // _MIB:,} MiB{process}{load}"
            )
        machine = self.machine
        gpus = f"; GPUs of {', '.join(f'{size // _MIB:,}' for size in machine.gpus)} MiB" * bool(machine.gpus)
        host = f"host memory: {self.host_bytes // _MIB:,} MiB with {self._num_stubs} stubs"
        yield f"{host}; {machine.available // _MIB:,} MiB available{gpus}"

    @property
    def host_bytes(self) -> int:
        """Return what the launch takes of host memory when its pools are full."""
        return self.certain_bytes + sum(
            worker.count * (worker.engine.pool + worker.engine.step)
            for worker in self.workers
            if worker.engine is not None and worker.gpu is None
        )

    def problems(self) -> Iterator[FitProblem]:
        for worker in self.workers:
            refused = [*self._dtype_problems(worker), *self._excluded_problems(worker)]
            yield from refused
            if worker.is_wrong and not refused:
                model = self._recipe.worker_model_path(worker.stage)
                yield FitProblem(key="model", value=model, reason=worker.reason, remedy="", is_error=True)
            if absent := list(self._absent_gpu(worker)):
                yield from absent
            elif worker.engine is not None:
                yield from self._kv_problems(worker)
                yield from self._form_problems(worker)
            if worker.engine is not None and worker.gpu is not None:
                yield from self._gpu_problems(worker, worker.engine)
        yield from self._host_problems()

    @property
    def certain_bytes(self) -> int:
        """Return weights and processes, which are there from the start."""
        engines = sum(worker.count for worker in self.workers)
        engines *= 2 if self._recipe.supervisor.standby else 1
        processes = engines * ENGINE_PROCESS_BYTES + self._num_stubs * STUB_BYTES + _SERVER_BYTES
        return processes + self._host_weights() + self._host_tiers()

    def _host_weights(self) -> int:
        found = [
            (self._recipe.worker_model_path(worker.stage), worker.engine.dtype, worker.count, worker.engine.weights)
            for worker in self.workers
            if worker.engine is not None and worker.gpu is None
        ]
        if self._recipe.memory_service.enabled:
            return sum({(model, dtype): weights for model, dtype, _, weights in found}.values())
        return sum(count * weights for _, _, count, weights in found)

    def _host_tiers(self) -> int:
        entries = self._recipe.workers.values()
        return sum(entry.replicas * (entry.engine_config.kv_cache_config.host_cache_size or 0) for entry in entries)

    def _worker(self, stage: str) -> WorkerFootprint:
        entry = self._recipe.workers[stage]
        gpu = self._gpu_of(stage)
        try:
            engine = self._engine(stage, gpu)
            folder = Path(self._recipe.worker_model_path(stage))
            is_sure = not gguf_files(folder) and _has_plain_weights(read_config(folder))
        except ConfigError as error:
            is_wrong = not isinstance(error, UncountedError)
            return WorkerFootprint(
                stage=stage, count=entry.replicas, gpu=gpu, engine=None, reason=str(error), is_wrong=is_wrong
            )
        return WorkerFootprint(stage=stage, count=entry.replicas, gpu=gpu, engine=engine, is_sure=is_sure)

    def _engine(self, stage: str, gpu: int | None) -> EngineFootprint:
        """Raises ConfigError where it can't be counted."""
        recipe, entry = self._recipe, self._recipe.workers[stage]
        if not entry.kind.has_footprint or stage not in _SIZED_STAGES:
            raise UncountedError("not counted: no text engine of torch")
        folder = Path(recipe.worker_model_path(stage))
        if not folder.is_dir():
            raise UncountedError(f"not counted: {folder} is not on this machine")
        asked, draft = entry.engine_config, None
        speculation = asked.speculative_config
        if speculation is not None and speculation.speculative_model and _is_loaded(speculation.decoding_type, stage):
            if not Path(speculation.speculative_model).is_dir():
                raise UncountedError(f"not counted: {speculation.speculative_model}, which drafts, is not here")
            draft = _draft_sizes(asked, speculation.decoding_type, Path(speculation.speculative_model))
        around = Surroundings(
            gpu_bytes=self.machine.gpus[gpu] if gpu is not None else 0,
            capability=self.machine.capability(gpu),
            has_compiler=_has_compiler(),
            shares_weights=recipe.memory_service.enabled,
            gpu_neighbors=gpu_neighbors(recipe, stage) if gpu is not None else (),
        )
        return _sizes(asked, folder, draft).footprint(around)

    def _gpu_of(self, stage: str) -> int | None:
        entry, gpus = self._recipe.workers[stage], self.machine.gpus
        if not gpus or not entry.kind.needs_model:
            return None
        index = self._device_of(stage)
        return index if index < len(gpus) else None

    def _device_of(self, stage: str) -> int:
        entry = self._recipe.workers[stage]
        return int(devices_of(entry, stage)[0]) if entry.devices else 0

    def _absent_gpu(self, worker: WorkerFootprint) -> Iterator[FitProblem]:
        """Of a worker on a GPU that is not among those here."""
        gpus, index = self.machine.gpus, self._device_of(worker.stage)
        if gpus and self._recipe.workers[worker.stage].kind.needs_model and index >= len(gpus):
            reason = f"there is no GPU {index} among {len(gpus)}, so this worker is counted on the CPU"
            remedy = "name one that is there, or check with a --gpu for each"
            key = f"workers.{worker.stage}.devices"
            yield FitProblem(key=key, value=str(index), reason=reason, remedy=remedy, is_error=False)

    def _kv_problems(self, worker: WorkerFootprint) -> Iterator[FitProblem]:
        """Of KV that this machine's engines do not attend to."""
        asked = self._recipe.workers[worker.stage].engine_config.kv_cache_config.dtype
        why = why_no_fp8_kv(bool(self.machine.gpus)) or why_no_fp8(self.machine.capability(worker.gpu))
        if asked == FP8 and why:
            key = f"workers.{worker.stage}.engine_config.kv_cache_config.dtype"
            yield FitProblem(key=key, value=asked, reason=why, remedy=FP8_REMEDY, is_error=True)

    def _form_problems(self, worker: WorkerFootprint) -> Iterator[FitProblem]:
        """Of weights in a form that this machine's engines do not multiply with."""
        algo = self._recipe.workers[worker.stage].engine_config.quant_config.quant_algo
        if not algo or algo == NO_QUANT:
            return
        folder = Path(self._recipe.worker_model_path(worker.stage))
        is_plain, why = _has_plain_weights(read_config(folder)) and not gguf_files(folder), ""
        if worker.gpu is not None:
            why = why_no_few_bits(algo, self.machine.capability(worker.gpu))
        if why and not is_plain:
            why, remedy = f"the checkpoint is so, and can't stay: {why}", DEQUANTIZE
        elif why:
            remedy = NEWER_GPU
        elif is_plain and worker.gpu is None:
            why, remedy = NO_FEW_BITS, "remove it, or use engine: trtllm"
        else:
            return
        key = f"workers.{worker.stage}.engine_config.quant_config.quant_algo"
        yield FitProblem(key=key, value=algo, reason=why, remedy=remedy, is_error=True)

    def _excluded_problems(self, worker: WorkerFootprint) -> Iterator[FitProblem]:
        """Of modules that can't be left out of what is rounded."""
        entry = self._recipe.workers[worker.stage]
        asked = entry.engine_config.quant_config
        if not asked.exclude_modules or not entry.kind.has_footprint:
            return
        try:
            folder = Path(self._recipe.worker_model_path(worker.stage))
            config = read_config(folder)
            num_layers = len(read_shape(config).windows)
        except ConfigError:
            return  # why it is not counted is told
        is_quantized = not _has_plain_weights(config) or bool(gguf_files(folder))
        if refused := why_not_excluded(asked.exclude_modules, asked.quant_algo, is_quantized, num_layers):
            key, (value, reason) = f"workers.{worker.stage}.engine_config.{KEY}", refused
            yield FitProblem(key=key, value=value, reason=reason, remedy="", is_error=True)

    def _dtype_problems(self, worker: WorkerFootprint) -> Iterator[FitProblem]:
        entry = self._recipe.workers[worker.stage]
        why = why_no_bfloat16(self.machine.capability(worker.gpu)) if worker.gpu is not None else ""
        if why and entry.kind.has_footprint and entry.engine_config.dtype == "bfloat16":
            key = f"workers.{worker.stage}.engine_config.dtype"
            yield FitProblem(key=key, value="bfloat16", reason=why, remedy=OTHER_DTYPE, is_error=True)

    def _gpu_problems(self, worker: WorkerFootprint, engine: EngineFootprint) -> Iterator[FitProblem]:
        assert worker.gpu is not None
        size, below = self.machine.gpus[worker.gpu], f"workers.{worker.stage}.engine_config"
        room = size - GPU_CONTEXT_BYTES - engine.weights - engine.step
        if room < 0:
            yield FitProblem(
                key=f"{below}.dtype",
                value=engine.dtype,
                reason=f"weights of {engine.weights // _MIB:,} MiB and a step of {engine.step // _MIB:,} MiB do not fit"
                f" GPU {worker.gpu}, which has {size // _MIB:,} MiB",
                remedy="take a smaller model or a larger GPU",
                is_error=worker.is_sure and _SURE * engine.weights > size,
            )
        elif engine.pool > room:
            yield FitProblem(
                key=f"{below}.kv_cache_config.max_tokens",
                value=str(engine.pool_tokens),
                reason=f"a KV pool of {engine.pool // _MIB:,} MiB does not fit beside weights and steps",
                remedy=f"set {room // engine.bytes_per_token - engine.limits.tokens_per_block} or less",
                is_error=worker.is_sure and _SURE * (engine.pool + engine.weights) > size,
            )

    @property
    def _on_host(self) -> list[tuple[WorkerFootprint, EngineFootprint]]:
        return [(worker, worker.engine) for worker in self.workers if worker.engine is not None and worker.gpu is None]

    def _host_problems(self) -> Iterator[FitProblem]:
        machine, certain, found = self.machine, self.certain_bytes, self._on_host
        if not found or not machine.available:
            return
        worker, engine = max(found, key=lambda pair: pair[0].count * pair[1].weights)
        room = machine.available - certain
        steps, pools, loads = (
            sum(each.count * getattr(one, name) for each, one in found) for name in ("step", "pool", "load")
        )
        if room < 0:
            yield self._shortage(worker, engine, certain)
        elif pools + steps > room:
            yield self._pool_problem(worker, engine, max(0, room - steps))
        elif loads > room:
            yield FitProblem(
                key=f"workers.{worker.stage}.engine_config.dtype",
                value=engine.dtype,
                reason=f"while weights are loaded and put in order they take {loads // _MIB:,} MiB more, and"
                f" {room // _MIB:,} MiB are left of what is available",
                remedy="set bfloat16, or have swap for the load",
                is_error=False,
            )

    def _shortage(self, worker: WorkerFootprint, engine: EngineFootprint, certain: int) -> FitProblem:
        """Weights and processes alone are too much."""
        machine, each = self.machine, engine.weights + ENGINE_PROCESS_BYTES
        most = (machine.available - certain + worker.count * each) // each
        key, value, remedy = "engine_config.dtype", engine.dtype, "take a smaller model or more memory"
        if worker.count > 1 and most >= 1 and not self._recipe.memory_service.enabled:
            key, value, remedy = "replicas", str(worker.count), f"set {most}, or memory_service.enabled: true"
        return FitProblem(
            key=f"workers.{worker.stage}.{key}",
            value=value,
            reason=f"weights and processes take {certain // _MIB:,} MiB of host memory, and"
            f" {machine.available // _MIB:,} MiB are available",
            remedy=remedy,
            is_error=all(each.is_sure for each, _ in self._on_host)
            and _SURE * certain > machine.available + machine.swap,
        )

    def _pool_problem(self, worker: WorkerFootprint, engine: EngineFootprint, room: int) -> FitProblem:
        """Full pools do not fit in `room`."""
        per_token = sum(each.count * one.bytes_per_token for each, one in self._on_host)
        size = engine.limits.tokens_per_block
        tokens = max(0, (room // per_token // size - 1) * size)  # one block is padding
        return FitProblem(
            key=f"workers.{worker.stage}.engine_config.kv_cache_config.max_tokens",
            value=str(engine.pool_tokens),
            reason=f"full KV pools do not fit in the {room // _MIB:,} MiB that weights, processes and steps leave",
            remedy=f"set {tokens} or less in each worker" if tokens else "take a smaller model or more memory",
            is_error=False,
        )


def _is_loaded(kind: str | None, stage: str) -> bool:
    """Return whether a stage's engines have the model that drafts: on prefill a head, which sees the prompts."""
    return stage != "prefill" or kind in EAGLE


def _draft_sizes(asked: EngineConfig, kind: str, folder: Path) -> EngineSizes | HeadSizes:
    if kind in EAGLE:
        return HeadSizes(read_config(folder), sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    return _sizes(draft_config(asked), folder)


def _sizes(asked: EngineConfig, folder: Path, draft: EngineSizes | HeadSizes | None = None) -> EngineSizes:
    """Raises ConfigError where it can't be counted."""
    config = read_config(folder)
    shape = read_shape(config)
    files = None  # of a quantized checkpoint: config.json says what its weights are
    if _has_plain_weights(config):
        files = read_weight_files(folder, not shape.parameters.head, len(shape.windows))
    if files is None and config.block("vision_config") is not None:
        raise UncountedError("not counted: a model that sees is counted from its files, and there are none")
    paths = gguf_files(folder)
    return EngineSizes(asked, shape, files, kept_blocks(read_head(paths[0])) if paths else None, draft)


def _has_plain_weights(config: ConfigFields) -> bool:
    told = config.block("quantization_config")
    return told is None or is_of_kv_alone(told.tree)


def _has_compiler() -> bool:
    try:
        native.find_compiler()
    except (native.NativeUnavailableError, ValueError):
        return False
    return True
