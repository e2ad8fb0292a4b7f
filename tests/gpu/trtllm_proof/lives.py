"""Which rows each engine process of a proof runs, and with which settings.

A row asks for one feature and looks at what comes back. It raises Failed or Skipped, or says what it saw; any other
exception is a failure, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.gpu.trtllm_proof import answer_rows, kv_rows, sampling_rows
from tests.gpu.trtllm_proof.bench import Bench

Row = Callable[[Bench], str]


@dataclass(frozen=True)
class Life:
    """One engine process's rows, in order, after those that need no engine and its start."""

    stage: str
    yaml: dict[str, Any]
    rows: dict[str, Row]


_SIZES: dict[str, Any] = {"max_seq_len": 2048, "max_num_tokens": 2048}
_POOL: dict[str, Any] = {"max_tokens": 16_384, "free_gpu_memory_fraction": 0.3, "tokens_per_block": 32}
_APART = {
    **_SIZES,
    "kv_cache_config": _POOL,
    "cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": 2048, "kv_transfer_timeout_ms": 30_000},
}
_ONE = {
    **_SIZES,
    "kv_cache_config": _POOL | {"event_buffer_max_size": 4096},
    "guided_decoding_backend": "xgrammar",
    "return_perf_metrics": True,
}
_DRAFTS = {
    **_SIZES,
    "kv_cache_config": _POOL,
    "speculative_config": {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2},
}
LIVES = {
    "one": Life(
        "decode",
        _ONE,
        {
            "model": answer_rows.model,
            "contract": answer_rows.the_contract,
            "start": answer_rows.start,
            "generate": answer_rows.generate,
            "batch": answer_rows.batch,
            "stream": answer_rows.stream,
            "stop ids": answer_rows.stop_ids,
            "end id": answer_rows.end_id,
            "stop strings": answer_rows.stop_strings,
            "log probabilities": sampling_rows.log_probabilities,
            "prompt log probabilities": sampling_rows.prompt_log_probabilities,
            "sampling": sampling_rows.sampling,
            "seeds": sampling_rows.seeds,
            "penalties": sampling_rows.penalties,
            "bias": sampling_rows.bias,
            "bad words": sampling_rows.bad_words,
            "least tokens": answer_rows.least_tokens,
            "processors": sampling_rows.processors,
            "guides": sampling_rows.guides,
            "cancel": answer_rows.cancel,
            "reuse": kv_rows.reuse,
            "salts": kv_rows.salts,
            "KV events": kv_rows.kv_events,
            "statistics": answer_rows.statistics,
            "times": answer_rows.times,
            "errors": answer_rows.errors,
        },
    ),
    "speculation": Life("decode", _DRAFTS, {"start": answer_rows.start_with_drafts, "drafts": answer_rows.drafts}),
    "prefill": Life("prefill", _APART, {"start": answer_rows.start, "export": kv_rows.export}),
    "decode": Life(
        "decode", _APART, {"start": answer_rows.start, "whole": kv_rows.whole, "transfer": kv_rows.transfer}
    ),
}
