"""What the installed sampler ignores, served by bireme's own logits processors, or refused with the remedy.

Nothing that a request asks for is silently dropped. SamplingParams accept every field in every release, and the default
sampler of 1.2 ignores some; no release supports bad words of several tokens, or several stop ids under `min_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bireme.engines.trtllm.api import HEEDED_SINCE, Api
from bireme.engines.trtllm.arguments import Arguments
from bireme.engines.trtllm.sampling import PENALTIES, needs_own_min_tokens
from bireme.errors import RequestError
from bireme.logits import registry
from bireme.messages import EngineRequest, ProcessorCall, SamplingParams

_MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Substitutes:
    version: str
    unheeded: frozenset[str]
    has_other_sampler: bool
    has_overlap: bool  # a step begins before processors know the last token
    has_speculation: bool

    @classmethod
    def of(cls, api: Api, arguments: Arguments) -> Substitutes:
        is_other = arguments.values.get("sampler_type") == "TRTLLMSampler"
        return cls(
            api.version,
            frozenset() if is_other else api.unheeded,
            api.has_other_sampler and not is_other,
            arguments.has_overlap,
            arguments.has_speculation,
        )

    def apply(self, request: EngineRequest, fields: dict[str, Any], eos_ids: Sequence[int]) -> list[ProcessorCall]:
        """Take ignored fields out of SamplingParams' fields; return the processors to run instead, in order.

        `fields` gets a "logit_bias" for what a bias can do. Raises RequestError for what can't be served.
        """
        sampling = request.sampling
        if "seed" in self.unheeded and not sampling.is_seed_drawn and fields.pop("seed", None) is not None:
            raise RequestError(f"seed: {sampling.seed}; {self._ignores('seeds')}; leave it out{self._other_ways()}")
        bias = dict(sampling.logit_bias)
        if "bad_token_ids" in self.unheeded:
            bias |= dict.fromkeys(fields.pop("bad_token_ids", ()), _MINUS_INFINITY)
        if bias:
            fields["logit_bias"] = bias
        own = [*self._penalties(sampling, fields), *_bad_words(sampling)]
        for call in own:
            self._check_own(call, request)
        ends = self._min_tokens(request, eos_ids)
        given = list(sampling.logits_processors)
        if self.has_overlap:
            self._check_overlap(given)
        return own + ends + given

    def obstacle(self, request: EngineRequest) -> str:
        """Return what keeps processors from running; "" for nothing."""
        if self.has_speculation:
            return "speculative decoding"
        return "" if request.request_type == "context_and_generation" else "disaggregated serving"

    def _penalties(self, sampling: SamplingParams, fields: dict[str, Any]) -> list[ProcessorCall]:
        calls = []
        for name, neutral in PENALTIES.items():
            if name in self.unheeded and fields.pop(name, neutral) != neutral:
                calls.append(ProcessorCall(name, {"penalty": getattr(sampling, name)}))
        return calls

    def _check_own(self, call: ProcessorCall, request: EngineRequest) -> None:
        """A penalty or bad words: both depend on each token so far."""
        if call.name == "bad_words":
            asked = f"bad_words: {len(call.args['sequences'])} of several tokens; TensorRT-LLM has single ones only"
            others = ""
        else:
            asked = f"{call.name}: {call.args['penalty']:g}; {self._ignores('penalties')}"
            others = self._other_ways()
        if obstacle := self.obstacle(request):
            raise RequestError(
                f"{asked}, and runs no logits processor together with {obstacle}; leave them out{others}"
            )
        if self.has_overlap:
            raise RequestError(
                f"{asked}, and its overlap scheduler does not tell a logits processor the last token; set"
                f" disable_overlap_scheduler: true in the engine YAML{others}"
            )

    def _min_tokens(self, request: EngineRequest, eos_ids: Sequence[int]) -> list[ProcessorCall]:
        if not needs_own_min_tokens(request.sampling, eos_ids):
            return []
        least = request.sampling.min_tokens or 0
        if obstacle := self.obstacle(request):
            raise RequestError(
                f"min_tokens: {least}; several ids end this request, TensorRT-LLM holds back one, and runs no logits"
                f" processor together with {obstacle}; leave it out, or send one stop id (end_id)"
            )
        # The list that a processor gets is one short then, but for the first token.
        return [ProcessorCall("min_tokens", {"min_tokens": max(1, least - 1) if self.has_overlap else least})]

    def _check_overlap(self, calls: Sequence[ProcessorCall]) -> None:
        for call in calls:
            if registry.reads_token_ids(call.name):
                raise RequestError(
                    f"logits_processors: {call.name}; it reads the tokens so far, and TensorRT-LLM's overlap scheduler"
                    " does not tell the last one; set disable_overlap_scheduler: true in the engine YAML, or say"
                    " reads_token_ids = False in its factory if it doesn't read them"
                )

    def _ignores(self, what: str) -> str:
        return f"TensorRT-LLM {self.version}'s sampler ignores {what}"

    def _other_ways(self) -> str:
        other = ", set sampler_type: TRTLLMSampler" if self.has_other_sampler else ""
        return f"{other}, or run TensorRT-LLM {HEEDED_SINCE} or later"


def _bad_words(sampling: SamplingParams) -> list[ProcessorCall]:
    words = [list(sequence) for sequence in sampling.bad_token_ids if len(sequence) > 1]
    return [ProcessorCall("bad_words", {"sequences": words})] if words else []
