"""ai-dynamo's own code for TensorRT-LLM, unmodified, on the stand-in beside bireme's engine: what both make of it.

`python -m tests.contract.dynamo_caller PACKAGES MODEL` prints one JSON object for the release of TRTLLM_STAND_IN.
PACKAGES is the site-packages of an environment with ai-dynamo: only what this Python lacks is taken from there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from bireme.disagg import DisaggregatedParams
from bireme.engines.trtllm import api as trtllm_api
from bireme.engines.trtllm.disaggregation import export, restore
from bireme.engines.trtllm.kv_events import KvEventReader
from bireme.kv.blocks.events import BlocksRemoved, BlocksStored
from tests.contract.trtllm_harness import PROMPT, Harness

APART = {"cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": 8192}}
ENGINE = {"dtype": "float32", "max_batch_size": 8, "disable_overlap_scheduler": True, "skip_tokenizer_init": True}
BLOCK, NUM_TOKENS = 32, 12
FULL = {  # of a prefill's params
    "request_type": "context_only",
    "first_gen_tokens": [17, 18],
    "ctx_request_id": 1 << 61,
    "opaque_state": bytes(range(256)),
    "draft_tokens": [5, 6, 7],
}


def codecs(api: trtllm_api.Api) -> dict[str, Any]:
    """Both ways from prefill's params to decode's, over JSON; the fields as text, for they may be objects."""
    from dynamo.trtllm.utils.disagg_utils import DisaggregatedParamsCodec
    from tensorrt_llm.executor.result import Logprob

    later = {
        "first_gen_log_probs": [{17: Logprob(-0.5, 1), 9: Logprob(-0.75, 2)}, {18: Logprob(-1.5, 1)}],
        "disagg_request_id": (1 << 60) - 1,
    }
    given = api.disaggregated_params(
        **FULL, **{name: later[name] for name in later if name in api.disaggregated_fields}
    )
    sent = dataclasses.asdict(DisaggregatedParamsCodec.encode(given))
    DisaggregatedParamsCodec.serialize_first_gen_log_probs(sent)
    come = json.loads(json.dumps(sent, default=lambda value: value.value))
    DisaggregatedParamsCodec.deserialize_first_gen_log_probs(come)
    if "schedule_style" in come:
        come["schedule_style"] = given.schedule_style  # Dynamo's own wire carries the enum
    theirs = DisaggregatedParamsCodec.decode(type(given)(**come))
    theirs.request_type = "generation_only"  # its decode handler does that
    ours = restore(through_json(export(given, api)), api)
    return {"theirs": as_text(theirs), "ours": as_text(ours)}


def through_json(fields: dict[str, Any]) -> DisaggregatedParams:
    params = DisaggregatedParams(worker="", life=0, lease_id=0, generation=0, num_tokens=80, **fields)
    return msgspec.json.decode(msgspec.json.encode(params), type=DisaggregatedParams)


def as_text(params: Any) -> dict[str, str]:
    return {field.name: repr(getattr(params, field.name)) for field in dataclasses.fields(params)}


async def served(model: Path) -> dict[str, Any]:
    """Return the greedy tokens of Dynamo's handlers, together and apart, and what the first of prefill is."""
    together = await started(model, "AGGREGATED")
    prefill, decode = await started(model, "PREFILL", **APART), await started(model, "DECODE", **APART)
    (answer,) = [answer async for answer in prefill.generate(asked(), context())]
    handed = answer["disaggregated_params"]["first_gen_tokens"]
    apart = await tokens(decode, prefill_result=answer)
    found = {"together": await tokens(together), "handed": handed, "apart": apart}
    for handler in (together, prefill, decode):
        await handler.engine.cleanup()
    return found


async def started(model: Path, mode: str, **settings: Any) -> Any:
    from dynamo.trtllm.constants import DisaggregationMode
    from dynamo.trtllm.engine import TensorRTLLMEngine
    from dynamo.trtllm.request_handlers.handler_base import RequestHandlerConfig
    from dynamo.trtllm.request_handlers.handlers import get_request_handler
    from tensorrt_llm.llmapi import SamplingParams

    kv = {"event_buffer_max_size": 1024, "tokens_per_block": BLOCK, "max_tokens": 4096}
    engine = TensorRTLLMEngine(
        {"model": str(model), "kv_cache_config": kv} | ENGINE | settings, DisaggregationMode[mode]
    )
    await engine.initialize()
    default = SamplingParams(detokenize=False, end_id=-1, pad_id=0)
    return get_request_handler(RequestHandlerConfig(engine, default, None, DisaggregationMode[mode]))


def asked(**more: Any) -> dict[str, Any]:
    stop = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {"token_ids": list(PROMPT), "stop_conditions": stop, "sampling_options": {"temperature": 0.0}} | more


def context() -> Any:
    from dynamo._core import Context

    return Context()


async def tokens(handler: Any, **more: Any) -> list[int]:
    return [token async for answer in handler.generate(asked(**more), context()) for token in answer["token_ids"]]


async def events(model: Path, hashes: dict[str, str]) -> list[dict[str, Any]]:
    """Two prompts, and the first of them again, which makes no new blocks."""
    from tensorrt_llm.llmapi import LLM, SamplingParams

    kv = {"event_buffer_max_size": 1024, "tokens_per_block": BLOCK, "max_tokens": 4096} | hashes
    llm, found = LLM(model=str(model), kv_cache_config=kv, **ENGINE), []
    for prompt in (PROMPT, PROMPT[::-1], PROMPT):
        await llm.generate_async(prompt, SamplingParams(max_tokens=NUM_TOKENS, end_id=-1, pad_id=0))
    try:
        async for event in llm.get_kv_cache_events_async(timeout=1):
            found.append(event)
    except (TimeoutError, asyncio.QueueEmpty):
        pass
    llm.shutdown()
    return found


class Kept:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish_batch(self, events: list[Any]) -> None:
        self.events += events


def readers(raw: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what Dynamo's publisher and bireme's reader make of the same events: kind, tokens, number of blocks."""
    from dynamo.trtllm.publisher import Publisher

    publisher = Publisher(None, OneRank(), 1, BLOCK, {}, None)
    kept = Kept()
    publisher.kv_event_publishers = {0: kept}
    publisher._handle_kv_event_drain(raw)
    theirs = [(one["type"], one.get("token_ids", []), len(one["block_hashes"])) for one in kept.events]
    reader, ours = KvEventReader(BLOCK), []
    for event in (event for event_of in raw for event in reader.read(event_of)):
        if isinstance(event, BlocksStored):
            ours.append(("stored", [token for block in event.blocks for token in block.tokens], len(event.blocks)))
        elif isinstance(event, BlocksRemoved):
            ours.append(("removed", [], len(event.block_hashes)))
    return {"theirs": theirs, "ours": ours}


class OneRank:
    def get_attention_dp_size(self) -> int:
        return 1


def main() -> None:
    packages, model = sys.argv[1], Path(sys.argv[2])
    sys.path.append(packages)  # last: torch and the like are this Python's
    harness = Harness("decode", model, {})
    api = harness.engine._loaded.api
    found = {"codecs": codecs(api), "tokens": harness.tokens(max_tokens=NUM_TOKENS, ignore_eos=True)}
    harness.engine.stop()
    if "priority" in api.generate_parameters:  # 1.2.1 has none, and ai-dynamo 1.6.1 names one with each request
        found |= asyncio.run(served(model))
    is_v2 = api.version.startswith("1.4")  # its SHA-256 are text, and ai-dynamo 1.6.1 takes numbers alone
    found["events"] = readers(asyncio.run(events(model, {"kv_cache_event_hash_algo": "v2_sha256_64"} if is_v2 else {})))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
