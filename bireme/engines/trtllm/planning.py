"""From a checked request to the arguments of generate_async, or a refusal with its reason.

Runs on the caller's thread: reads only what never changes after the load. What TensorRT-LLM's own classes
refuse (ValueError, TypeError) is the request's fault as well.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bireme.disagg import DisaggregatedParams
from bireme.engines.base import AdmittedRequest, RequestKey
from bireme.engines.trtllm import disaggregation
from bireme.engines.trtllm.adapters import Adapters
from bireme.engines.trtllm.api import Api
from bireme.engines.trtllm.arguments import Arguments
from bireme.engines.trtllm.disaggregation import Claims, RequestIds
from bireme.engines.trtllm.guides import TrtllmGuides
from bireme.engines.trtllm.logits import LogitsAdapter, check_processors
from bireme.engines.trtllm.model_files import ModelFacts
from bireme.engines.trtllm.request_state import GenerateArguments, RequestState
from bireme.engines.trtllm.sampling import sampling_fields, stop_ids
from bireme.engines.trtllm.substitutes import Substitutes
from bireme.errors import RequestError
from bireme.logits.base import ProcessorContext
from bireme.messages import EngineRequest
from bireme.multimodal.wire import OpenedItem
from bireme.serving_options import KvCacheRetentionConfig

if TYPE_CHECKING:
    from bireme.engines.trtllm.pictures import PictureIntake

DEFAULT_PRIORITY = 0.5
logger = logging.getLogger("bireme.engine")


class Planner:
    def __init__(
        self,
        api: Api,
        arguments: Arguments,
        facts: ModelFacts,
        adapters: Adapters,
        ids: RequestIds,
        guides: TrtllmGuides,
        pictures: PictureIntake | None = None,
    ) -> None:
        self._api = api
        self._arguments = arguments
        self._facts = facts
        self._adapters = adapters
        self._ids = ids
        self._guides = guides
        self._pictures = pictures  # None: the model takes text alone
        self._substitutes = Substitutes.of(api, arguments)
        self._has_timings = bool(arguments.values.get("return_perf_metrics"))
        self._claims = Claims()
        self._is_priority_told = False

    def plan(self, key: RequestKey, admitted: AdmittedRequest) -> RequestState:
        """Raises RequestError, or NotFoundError for an export that is not there."""
        request, params = admitted.request, admitted.params
        prompt: list[int] = admitted.ids.tolist()  # Python's integers: numpy's are refused
        kind = self._kind(request)
        self._check(request, prompt, kind)
        self._check_logprobs(request, kind)
        call = GenerateArguments(prompt, self._sampling(request, len(prompt)), streaming=kind != "context_only")
        pictures = self._pictures.of(admitted.pictures, admitted.num_prompt) if self._pictures is not None else None
        call.more = self._more(request, params, kind, admitted.pictures)
        if params is not None:
            self._claims.claim(params)
        return RequestState(
            key=key,
            request=request,
            call=call,
            stop_ids=stop_ids(request.sampling, self._facts.eos_ids),
            params=params,
            pictures=pictures,
            kind=kind,
            num_prompt_logprobs=None if request.num_resumed else request.sampling.prompt_logprobs,
            is_canary=admitted.is_canary,
        )

    def _kind(self, request: EngineRequest) -> str:
        """A prefill whose one token is all that was requested exports nothing: decode will not come."""
        left = (request.sampling.max_tokens or 0) - request.num_resumed
        is_whole = request.request_type == "context_only" and left == 1
        return "context_and_generation" if is_whole else request.request_type

    def _check(self, request: EngineRequest, prompt: list[int], kind: str) -> None:
        arguments = self._arguments
        if kind == "context_only" and arguments.has_overlap and not self._api.overlaps_prefill:
            raise RequestError(  # TensorRT-LLM would not refuse it: it ends its worker, with every request
                f"request_type: {kind}; TensorRT-LLM {self._api.version} can't prefill alone beside its overlap"
                " scheduler; set disable_overlap_scheduler: true, or send it to a prefill worker"
            )
        if (
            len(prompt) > arguments.max_num_tokens
            and not arguments.values.get("enable_chunked_prefill")
            and request.request_type != "generation_only"
        ):
            raise RequestError(
                f"prompt: {len(prompt)} tokens; max_num_tokens is {arguments.max_num_tokens} and enable_chunked_prefill"
                " is false, so no step could take it; shorten it, raise the one or set the other"
            )
        if request.dp_rank is not None and not 0 <= request.dp_rank < arguments.attention_dp_size:
            raise RequestError(
                f"dp_rank: {request.dp_rank}; this worker has {arguments.attention_dp_size} attention-DP ranks,"
                " counted from 0"
            )

    def _check_logprobs(self, request: EngineRequest, kind: str) -> None:
        """Without prefill's log probabilities the decode side counts fewer than tokens, and fails by an assertion."""
        if request.sampling.prompt_logprobs is not None and request.request_type == "generation_only":
            raise RequestError(
                "prompt_logprobs: prefill makes them, and its answer has them; leave it out of generation_only"
            )
        is_carried = "first_gen_log_probs" in self._api.disaggregated_fields
        if request.sampling.logprobs is not None and kind != "context_and_generation" and not is_carried:
            raise RequestError(
                f"logprobs: {request.sampling.logprobs}; TensorRT-LLM {self._api.version} gives none after a KV"
                " transfer; leave it out, serve aggregated, or use TensorRT-LLM 1.3"
            )

    def _sampling(self, request: EngineRequest, num_prompt: int) -> Any:
        fields = sampling_fields(request, self._facts.eos_ids)
        if self._has_timings:  # from 1.3 on the engine's flag may mean its own server's answers alone
            fields["return_perf_metrics"] = True
        if processors := self._processors(request, fields, num_prompt):
            fields["logits_processor"] = processors
        if bias := fields.pop("logit_bias", None):
            fields["embedding_bias"] = self._bias(bias)
        unknown = sorted(fields.keys() - self._api.sampling_fields)
        if unknown:
            raise RequestError(f"{unknown[0]}: TensorRT-LLM {self._api.version} has no such parameter; leave it out")
        try:
            if (guide := request.sampling.guided_decoding) is not None:
                fields["guided_decoding"] = self._api.guided_decoding_params(**self._guides.fields(guide))
            return self._api.sampling_params(**fields)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise RequestError(f"sampling parameters: TensorRT-LLM refuses them: {error}") from error

    def _processors(self, request: EngineRequest, fields: dict[str, Any], num_prompt: int) -> list[LogitsAdapter]:
        sampling, facts = request.sampling, self._facts
        ends = stop_ids(sampling, facts.eos_ids)
        context = ProcessorContext("", facts.vocab_size, num_prompt - request.num_resumed, ends)
        if sampling.logits_processors:
            check_processors(sampling.logits_processors, context, self._substitutes.obstacle(request))
        calls = self._substitutes.apply(request, fields, facts.eos_ids)
        placeholder = self._pictures.model.placeholder if self._pictures is not None else None
        return [LogitsAdapter(calls, context, placeholder)] if calls else []

    def _bias(self, bias: dict[int, float]) -> Any:
        import torch

        values = torch.zeros(self._facts.vocab_size, dtype=torch.float32)
        values[list(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32)
        return values

    def _more(
        self,
        request: EngineRequest,
        params: DisaggregatedParams | None,
        kind: str,
        pictures: tuple[OpenedItem, ...],
    ) -> dict[str, Any]:
        more: dict[str, Any] = {}
        options = request.options
        if salt := disaggregation.salt_of(options.cache_salt, kind, pictures):
            more["cache_salt"] = salt
        if options.lora_name:
            more["lora_request"] = self._adapters.request(options.lora_name)
        if options.kv_cache_retention_config is not None:
            more["kv_cache_retention_config"] = retention_config(self._api, options.kv_cache_retention_config)
        if options.priority != DEFAULT_PRIORITY:
            self._tell_priority()
            if "priority" in self._api.generate_parameters:
                more["priority"] = options.priority
        if request.traceparent and "trace_headers" in self._api.generate_parameters:
            more["trace_headers"] = trace_headers(request)
        if request.dp_rank is not None:
            more["scheduling_params"] = self._api.scheduling_params(
                attention_dp_rank=request.dp_rank, attention_dp_relax=False
            )
        if kind == "context_only":
            more["disaggregated_params"] = disaggregation.context_only(self._api, self._ids)
        elif kind == "generation_only":
            assert params is not None, "the gate lets no generation_only through without params"
            more["disaggregated_params"] = disaggregation.restore(params, self._api)
        return more

    def _tell_priority(self) -> None:
        """Once: the request is served all the same."""
        if self._is_priority_told:
            return
        self._is_priority_told = True
        scheduler = self._arguments.values.get("scheduler_config") or {}
        if "priority" not in self._api.generate_parameters:
            logger.warning("priority_without_effect reason=this release of TensorRT-LLM has none")
        elif scheduler.get("waiting_queue_policy") != "priority":
            logger.warning("priority_without_effect remedy=set scheduler_config.waiting_queue_policy to priority")


def trace_headers(request: EngineRequest) -> dict[str, str]:
    """Return what makes TensorRT-LLM's own spans part of the request's trace."""
    state = {"tracestate": request.tracestate} if request.tracestate else {}
    return {"traceparent": request.traceparent} | state


def retention_config(api: Api, config: KvCacheRetentionConfig) -> Any:
    """Durations are timedeltas."""
    kind = api.retention_config
    ranges = [
        kind.TokenRangeRetentionConfig(one.token_start, one.token_end, one.priority, _duration(one.duration_ms))
        for one in config.token_range_retention_configs
    ]
    return kind(ranges, config.decode_retention_priority, _duration(config.decode_duration_ms))


def _duration(duration_ms: int | None) -> timedelta | None:
    return None if duration_ms is None else timedelta(milliseconds=duration_ms)
