"""From a request to a Sequence: what this engine can't do, or could never fit, is refused here, at submit.

Runs on the caller's thread, so it only reads what never changes. Values that any engine checks (ids, NaN,
limits of the recipe) are the gate's, in bireme/engines/child/validate.py.
"""

from __future__ import annotations

import secrets
import time

import msgspec
import numpy as np

from bireme.disagg import DisaggregatedParams
from bireme.engines.base import RequestKey
from bireme.engines.digests import request_digest
from bireme.engines.torch.guides import TorchGuides
from bireme.engines.torch.limits import EngineLimits
from bireme.engines.torch.picture_store import PictureStore
from bireme.engines.torch.pictures import SequencePictures, pictures_of
from bireme.engines.torch.sequence import Sequence
from bireme.errors import NotFoundError, RequestError
from bireme.kv.block_manager import BlockManager
from bireme.logits.sampler import Sampler
from bireme.messages import EngineRequest, SamplingParams


class Admission:
    def __init__(
        self,
        limits: EngineLimits,
        manager: BlockManager,
        sampler: Sampler[RequestKey],
        vocab_size: int,
        eos_ids: tuple[int, ...],
        has_transfer: bool,
        guides: TorchGuides,
        pictures: PictureStore | None = None,
        merge_size: int = 0,
    ) -> None:
        """`merge_size`: of models with positions in three dimensions, model_config.PictureModel."""
        self._limits = limits
        self._manager = manager
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._has_transfer = has_transfer
        self._guides = guides
        self._store, self._merge_size = pictures, merge_size

    def admit(self, key: RequestKey, request: EngineRequest, params: DisaggregatedParams | None) -> Sequence:
        """Raises RequestError, with value, limit and remedy, for what can never run."""
        tokens = self._tokens(request)
        self._check_features(request, params)
        if request.sampling.seed is None:  # whoever may resume it elsewhere has drawn one; here any will do
            seeded = msgspec.structs.replace(request.sampling, seed=secrets.randbits(64))
            request = msgspec.structs.replace(request, sampling=seeded)
        num_prompt = len(tokens) - request.num_resumed
        pictures = self._pictures(request, num_prompt)
        now = time.monotonic()
        sequence = Sequence(
            key=key,
            request=request,
            tokens=tokens,
            num_prompt=num_prompt,
            max_tokens=self._max_tokens(request.sampling, num_prompt, request.num_resumed),
            stop_ids=frozenset((*self.eos_ids(request.sampling), *request.sampling.stop_token_ids)),
            arrived_at=now,
            table=self._manager.open(request.lora_name, request.cache_salt, pictures.spans if pictures else ()),
            deadline=now + request.timeout_ms / 1e3 if request.timeout_ms else 0.0,
            params=params,
            pictures=pictures,
            wants_prompt_logprobs=request.sampling.prompt_logprobs is not None and not request.num_resumed,
        )
        self._check_fit(sequence)
        self._sampler.check(request.sampling, self.eos_ids(request.sampling))
        return sequence

    def eos_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Return the ids that end this request by the model's or its own wish."""
        if sampling.ignore_eos:
            return ()
        return self._eos_ids if sampling.end_id is None else (sampling.end_id,)

    def _pictures(self, request: EngineRequest, num_prompt: int) -> SequencePictures | None:
        if self._store is None:
            if request.multimodal is not None:
                raise RequestError("multimodal: the model takes text only; leave it out")
            return None
        pictures = pictures_of(request, num_prompt, self._merge_size)
        if pictures is not None and pictures.is_to_be_computed:
            self._store.check(pictures)
        return pictures

    def _tokens(self, request: EngineRequest) -> list[int]:
        if not request.prompt or len(request.prompt) % 4:
            raise RequestError(f"prompt: {len(request.prompt)} bytes; int32 ids, at least one, 4 bytes each")
        ids = np.frombuffer(request.prompt, "<i4")
        if not 0 <= request.num_resumed < len(ids):
            raise RequestError(f"num_resumed: {request.num_resumed}; fewer than the prompt's {len(ids)} tokens")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            wrong = next(int(token) for token in ids if not 0 <= token < self._vocab_size)
            raise RequestError(f"prompt: token id {wrong} is not in the vocabulary, 0 to {self._vocab_size - 1}")
        num_prompt = len(ids) - request.num_resumed
        self._check_prompt_length(num_prompt)
        tokens: list[int] = ids.tolist()
        return tokens

    def _check_prompt_length(self, num_prompt: int) -> None:
        limits = self._limits
        if num_prompt > limits.max_input_len:
            raise RequestError(
                f"prompt: {num_prompt} tokens; this worker takes {limits.max_input_len} (max_input_len, and"
                f" max_seq_len {limits.max_seq_len} less one to generate); shorten it or raise them"
            )
        if not limits.enable_chunked_prefill and num_prompt > limits.max_num_tokens:
            raise RequestError(
                f"prompt: {num_prompt} tokens; max_num_tokens is {limits.max_num_tokens} and enable_chunked_prefill is"
                " false, so no step could take it; shorten it, raise the one or set the other"
            )

    def _check_features(self, request: EngineRequest, params: DisaggregatedParams | None) -> None:
        if request.lora_name:
            raise NotFoundError(
                f"lora_name: {request.lora_name[:100]!r}; the torch engine has no adapters, leave it out"
            )
        self._guides.check(request.sampling, self.eos_ids(request.sampling))
        if request.sampling.n != 1:
            raise RequestError(f"n: {request.sampling.n}; an engine runs one sequence a request")
        if request.request_type != "context_and_generation" and not self._has_transfer:
            raise RequestError(
                f"request_type: {request.request_type}, but this worker moves no KV; set"
                " cache_transceiver_config.backend (DEFAULT) or send context_and_generation"
            )
        if request.request_type == "generation_only":
            self._check_params(request, params)

    def _check_params(self, request: EngineRequest, params: DisaggregatedParams | None) -> None:
        if params is None or len(params.first_gen_tokens) != 1:
            raise RequestError(
                "disaggregated_params: generation_only needs what context_only returned, one token with it"
            )
        if params.num_tokens != len(request.prompt) // 4 or params.prompt_digest != request_digest(request):
            raise RequestError(
                "disaggregated_params: made for another prompt, cache_salt or lora_name; send them as prefill got them"
            )
        if request.sampling.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs: they are made by prefill, whose answer has them; leave it out of generation_only,"
                " or send context_and_generation"
            )

    def _max_tokens(self, sampling: SamplingParams, num_prompt: int, num_resumed: int) -> int:
        """Return how many tokens may be generated, resumed ones included; unset: what is left."""
        room = min(self._limits.max_seq_len, self._pool_tokens()) - num_prompt
        if sampling.max_tokens is None:
            return max(room, num_resumed)
        if sampling.max_tokens < 1:
            raise RequestError(f"max_tokens: {sampling.max_tokens}; at least 1")
        left = self._limits.max_seq_len - num_prompt
        if sampling.max_tokens > left:
            raise RequestError(
                f"max_tokens: {sampling.max_tokens} after {num_prompt} prompt tokens; max_seq_len is"
                f" {self._limits.max_seq_len}; ask for at most {left}"
            )
        return sampling.max_tokens

    def _pool_tokens(self) -> int:
        """Return the longest sequence that the pools hold; windows hold any length that the widest group does."""
        full = [spec.num_blocks for spec in self._manager.groups if not spec.window]
        return min(full, default=1 << 40) * self._manager.tokens_per_block

    def _check_fit(self, sequence: Sequence) -> None:
        need = self._manager.worst_case(sequence.worst_length, self._limits.max_num_tokens)
        if self._manager.can_ever_hold(need):
            return
        have = [spec.num_blocks for spec in self._manager.groups]
        raise RequestError(
            f"max_tokens: {sequence.num_prompt} prompt and {sequence.max_tokens} generated tokens take {max(need)} KV"
            f" blocks of {self._manager.tokens_per_block} tokens; the pool has {have[need.index(max(need))]};"
            " ask for less, or raise kv_cache_config.max_tokens"
        )
