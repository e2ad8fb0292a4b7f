"""From an admitted request to a Sequence: what only this engine can tell is refused here, at submit.

Runs on the caller's thread, so it only reads constants. The gate has checked everything that holds for any engine
(bireme/engines/child/validate.py).
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from bireme.engines.base import AdmittedRequest, RequestKey
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.images.picture_store import PictureStore, pictures_of
from bireme.engines.torch.scheduling.guides import TorchGuides
from bireme.engines.torch.step import Sequence
from bireme.errors import RequestError
from bireme.kv.blocks.block_manager import BlockManager
from bireme.kv.blocks.block_pool import Retention
from bireme.logits.sampler import Sampler
from bireme.messages import SamplingParams
from bireme.serving_options import KvCacheRetentionConfig


@dataclass(frozen=True, slots=True)
class Admission:
    limits: EngineLimits
    manager: BlockManager
    sampler: Sampler[RequestKey]
    model_eos_ids: tuple[int, ...]
    guides: TorchGuides
    pictures: PictureStore | None = None
    merge_size: int = 0  # of models with positions in three dimensions, model_config.PictureModel

    def admit(self, key: RequestKey, admitted: AdmittedRequest) -> Sequence:
        """Raises RequestError, with value, limit and remedy, for what this engine can never run."""
        request, params, num_prompt = admitted.request, admitted.params, admitted.num_prompt
        eos_ids = self.eos_ids(request.sampling)
        if not self.limits.enable_chunked_prefill and num_prompt > self.limits.max_num_tokens:
            raise RequestError(
                f"prompt: {num_prompt} tokens; max_num_tokens is {self.limits.max_num_tokens} and"
                " enable_chunked_prefill is false, so no step could take it; shorten it, raise the one or set the other"
            )
        self.guides.check(request.sampling, eos_ids)
        self.sampler.check(request.sampling, eos_ids)
        if params is not None and len(params.first_gen_tokens) != 1:
            raise RequestError(
                "disaggregated_params: generation_only needs what context_only returned, one token with it"
            )
        if params is not None and request.sampling.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs: they are made by prefill, whose answer has them; leave it out of generation_only,"
                " or send context_and_generation"
            )
        if request.sampling.seed is None:  # one that may move to another engine has one already
            seeded = msgspec.structs.replace(request.sampling, seed=secrets.randbits(64))
            request = msgspec.structs.replace(request, sampling=seeded)
        pictures = pictures_of(admitted.pictures, num_prompt, self.merge_size)
        if pictures is not None and pictures.is_to_be_computed:
            assert self.pictures is not None, "the gate lets no pictures through to a model of text alone"
            self.pictures.check(pictures)
        now = time.monotonic()
        sequence = Sequence(
            key=key,
            request=request,
            tokens=admitted.ids.tolist(),
            num_prompt=num_prompt,
            max_tokens=admitted.max_tokens,
            stop_ids=frozenset((*eos_ids, *request.sampling.stop_token_ids)),
            arrived_at=now,
            table=self.manager.open(
                request.options.lora_name,
                request.options.cache_salt,
                pictures.spans if pictures else (),
                block_retention(request.options.kv_cache_retention_config, num_prompt, self.limits.tokens_per_block),
            ),
            deadline=now + request.timeout_ms / 1e3 if request.timeout_ms else 0.0,
            params=params,
            pictures=pictures,
            wants_prompt_logprobs=request.sampling.prompt_logprobs is not None and not request.num_resumed,
            is_canary=admitted.is_canary,
        )
        self._check_fit(sequence)
        return sequence

    def eos_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Return the ids that end this request by the model's or its own wish."""
        if sampling.ignore_eos:
            return ()
        return self.model_eos_ids if sampling.end_id is None else (sampling.end_id,)

    def _check_fit(self, sequence: Sequence) -> None:
        need = self.manager.worst_case(sequence.worst_length, self.limits.max_num_tokens)
        if self.manager.can_ever_hold(need):
            return
        have = [spec.num_blocks for spec in self.manager.groups]
        raise RequestError(
            f"max_tokens: {sequence.num_prompt} prompt and {sequence.max_tokens} generated tokens take {max(need)} KV"
            f" blocks of {self.manager.tokens_per_block} tokens; the pool has {have[need.index(max(need))]};"
            " ask for less, or raise kv_cache_config.max_tokens"
        )


def block_retention(
    config: KvCacheRetentionConfig | None, num_prompt: int, tokens_per_block: int
) -> Callable[[int], Retention | None] | None:
    """Return how a block is kept, by its index: the range of its first token counts, and none leaves it as it is."""
    if config is None:
        return None
    asked = [(num_prompt, math.inf, config.decode_retention_priority, config.decode_duration_ms)]  # what is generated
    for one in config.token_range_retention_configs:
        asked.append((one.token_start, one.token_end or num_prompt, one.priority, one.duration_ms))
    ranges = [
        (begin, end, Retention(priority, None if duration_ms is None else duration_ms / 1000))
        for begin, end, priority, duration_ms in asked
    ]

    def retention_of(index: int) -> Retention | None:
        first = index * tokens_per_block
        return next((retention for begin, end, retention in ranges if begin <= first < end), None)

    return retention_of
