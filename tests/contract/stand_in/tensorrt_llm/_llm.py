"""LLM: the constructor and generate_async with the contract's signatures, over an executor."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorrt_llm import _contract, _pictures, _settings, _world
from tensorrt_llm._results import FetchedResult, IterationResult, RequestOutput
from tensorrt_llm._tracing import Tracer
from tensorrt_llm._values import RequestError, SamplingParams

_RPC_S = 0.0005
_SHUTDOWN_S = float(os.environ.get("TRTLLM_STAND_IN_SHUTDOWN_MS", "0")) / 1e3


def signed(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a method a signature that holds: what does not bind raises TypeError."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            arguments |= arguments.pop("kwargs", {})
            return method(**arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return wrap


class BaseLLM:
    """What both backends have in common."""

    _args_class = _settings.TorchLlmArgs

    @signed(_contract.constructor_signature())
    def __init__(self, **given: Any) -> None:
        given.pop("_mpi_session", None)
        self.args = self._args_class(**given)
        self._check(given)
        self._ids = itertools.count(1)
        self.llm_id = f"stand-in-{os.getpid()}"
        self._results: dict[str, IterationResult] = {}
        self._tracer = Tracer(self.args.otlp_traces_endpoint) if self.args.otlp_traces_endpoint else None
        _world.join(self.args.tensor_parallel_size * self.args.pipeline_parallel_size)
        self._load()

    @functools.cached_property
    def tokenizer(self) -> Any:
        """None where it is left out, or the model's folder has none."""
        if self.args.skip_tokenizer_init:
            return None
        from tensorrt_llm._model import load_tokenizer

        try:
            return load_tokenizer(self.args.model)
        except (OSError, ValueError):
            return None

    @functools.cached_property
    def input_processor(self) -> Any:
        return _pictures.make_input_processor(Path(self.args.model), self.tokenizer)

    def _check(self, given: dict[str, Any]) -> None:
        if self.args.backend not in (None, "pytorch"):
            raise ValueError(f"Unsupported backend {self.args.backend}")

    def _load(self) -> None:
        import torch

        from tensorrt_llm import _model
        from tensorrt_llm._executor import Executor

        folder = Path(self.args.model)
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder}: no config.json")
        dtype = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}[self.args.dtype]
        try:
            _settings.check_transceiver(self.args)
            model = _model.load(folder, dtype)
        except (OSError, ValueError, RuntimeError) as error:  # in the worker, whose reason stays in its own log
            print(f"[TRT-LLM] [E] Failed to initialize executor: {error}", file=sys.stderr)
            raise RuntimeError("Executor worker returned error") from error
        self._executor: Any = Executor(model, self.args)

    @signed(_contract.generate_async_signature())
    def generate_async(self, inputs: Any, sampling_params: Any, **more: Any) -> RequestOutput:
        from tensorrt_llm._executor import Sequence

        if self._executor is None:
            raise RuntimeError("LLM is shutting down")
        params = sampling_params if sampling_params is not None else SamplingParams()
        disaggregated = more["disaggregated_params"]
        self._check_params(params)
        pictured = _pictures.read(self.args, lambda: self.input_processor, inputs, disaggregated)
        prompt, media = pictured or (self._prompt(inputs), _pictures.Media(mrope=_pictures.mrope_of(disaggregated)))
        self._check_length(prompt, disaggregated)
        result = RequestOutput(next(self._ids), prompt, params, self._executor.abort, disaggregated)
        if self._tracer is not None:
            tracer, headers, began_ns = self._tracer, more["trace_headers"], time.time_ns()
            result.when_ended = lambda ended: tracer.ended(ended, headers, began_ns)
        # To the worker, another process: pickled in the caller's, and unpickled there.
        sent = pickle.dumps((prompt, params, disaggregated, media, more["lora_request"]))
        prompt, params, disaggregated, media, lora = pickle.loads(sent)
        self._executor.submit(
            Sequence(
                result,
                prompt,
                params,
                disaggregated=disaggregated,
                streaming=more["streaming"],
                salt=more["cache_salt"] or "",
                lora_name=lora.lora_name if lora is not None else "",
                rank=getattr(more["scheduling_params"], "attention_dp_rank", None) or 0,
                priority=more.get("priority", 0.5),
                arrived_at=time.monotonic(),
                media=media,
            )
        )
        self._remember(more)
        return result

    def _remember(self, more: dict[str, Any]) -> None:
        self.last_call = more  # for tests

    def _prompt(self, inputs: Any) -> list[int]:
        ids = inputs.get("prompt_token_ids") if isinstance(inputs, dict) else inputs
        if not isinstance(ids, list) or not ids:
            raise TypeError(f"The inputs must be type str or list of int, but got {type(ids)}")
        if not all(type(token) is int for token in ids):
            raise TypeError("prompt_token_ids must hold Python integers")  # numpy's are refused up to 1.3.0rc
        return ids

    def _check_params(self, params: Any) -> None:
        if self.args.skip_tokenizer_init:
            if params.end_id is None:
                raise ValueError("end_id must be set if tokenizer is not available")
            if params.stop or params.bad:
                raise ValueError("stop and bad words need a tokenizer")
        if params.guided_decoding is not None and self.args.guided_decoding_backend is None:
            raise ValueError("guided_decoding needs guided_decoding_backend")

    def _check_length(self, prompt: list[int], disaggregated: Any) -> None:
        """AutoDeploy checks nothing here: a prompt that no step can hold waits for ever."""
        if self.args.backend == "_autodeploy":
            return
        is_generation = disaggregated is not None and disaggregated.request_type == "generation_only"
        if not is_generation and not self.args.enable_chunked_prefill and len(prompt) > self.args.max_num_tokens:
            raise RequestError(
                f"The prompt length ({len(prompt)}) should not exceed max_num_tokens ({self.args.max_num_tokens})"
            )

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult | FetchedResult:
        if _contract.FROM_1_4:
            return FetchedResult(functools.partial(_take_all, self._executor.stats))
        return self._filled("stats", self._executor.stats, timeout)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        return self._filled("kv_events", self._executor.blocks.events, timeout)

    def _filled(self, name: str, source: Any, timeout: float | None) -> IterationResult:
        """A call of the worker that blocks the calling thread, loop or no loop; its answer fills the one queue."""
        time.sleep(_RPC_S)
        result = self._results.setdefault(name, IterationResult())
        result.set_timeout(timeout or 0)
        for text in _take_all(source):
            result.put(text)
        return result

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._filled("stats", self._executor.stats, timeout).get_results()

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._filled("kv_events", self._executor.blocks.events, timeout).get_results()

    def shutdown(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            time.sleep(_SHUTDOWN_S)
            executor.shutdown()

    def __reduce__(self) -> Any:
        raise RuntimeError("LLM object can't be pickled")


def _take_all(items: Any) -> list[str]:
    taken = []
    while items:
        taken.append(items.popleft())
    return taken


class LLM(BaseLLM):
    """The PyTorch backend."""


if _contract.FROM_1_3:

    def _capacity(self: BaseLLM) -> dict[str, int]:
        blocks = self._executor.blocks
        return {
            "maxNumBlocks": blocks.num_blocks,
            "tokensPerBlock": blocks.tokens_per_block,
            "maxNumTokens": blocks.num_blocks * blocks.tokens_per_block,
        }

    def _check_health(self: BaseLLM) -> bool:
        return self._executor is not None and self._executor.check_health()

    BaseLLM.get_kv_cache_capacity = _capacity  # type: ignore[attr-defined]
    BaseLLM._check_health = _check_health  # type: ignore[attr-defined]


if _contract.FROM_1_4:

    def _status(self: BaseLLM) -> dict[str, str]:
        return {"state": "released" if self._executor.is_asleep else "active"}

    def _release(self: BaseLLM, tags: list[str] | None = None) -> None:
        if self.args.sleep_config is None or self.args.kv_cache_config.use_kv_cache_manager_v2:
            raise ValueError("release needs sleep_config, and KV cache manager V1")
        self._executor.is_asleep = True

    def _resume(self: BaseLLM, tags: list[str] | None = None) -> None:
        self._executor.is_asleep = False

    BaseLLM.get_memory_status = _status  # type: ignore[attr-defined]
    BaseLLM.release = _release  # type: ignore[attr-defined]
    BaseLLM.resume = _resume  # type: ignore[attr-defined]


class AutoDeployLLM(BaseLLM):
    """AutoDeploy: `world_size` is its only way to use several GPUs."""

    _args_class = _settings.AutoDeployLlmArgs

    def _check(self, given: dict[str, Any]) -> None:
        _settings.check_autodeploy(self.args, given)
