"""The sampling parameters: each one's type, range and names, and where a request may send it. One row a parameter.

Everything else that lists parameters is made from this table: the tensors (specs.py), the check of requests
(sampling.py) and of an engine process (engines/child/validate.py), the fields beyond OpenAI's (pipelines/extensions.py)
and TensorRT-LLM's arguments (engines/trtllm/sampling.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

MAX_INT32 = 2**31 - 1
MAX_SEED = 2**64 - 1
_PYTHON_TYPES = {"INT32": int, "UINT64": int, "FP32": float, "BOOL": bool, "BYTES": str}


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str  # in JSON and in request parameters; where is_field, also SamplingParams'
    data_type: str = ""  # of its tensor; integers and numbers (INT32, UINT64, FP32) have a range
    low: float = -math.inf
    high: float = math.inf
    is_low_open: bool = False
    lowest: float | None = None  # below low, and accepted from clients: sampling.py translates it
    off: float | None = None  # the value that changes nothing
    remedy: str = ""  # for a value outside the range; "": what is off
    limit: str = ""  # the recipe's key in `limits` that sets the upper end
    openai_high: float = math.inf  # OpenAI's own upper end, on its endpoints
    is_list: bool = False
    is_field: bool = True  # of SamplingParams, unchanged
    is_random: bool = False  # says how to draw: greedy requests ignore it
    is_ignored: bool = False  # clients of other servers send it; nothing here depends on it
    tensors: tuple[str, ...] | None = None  # None: one of its own name
    # openai: a field of OpenAI's requests; shared: at their top level and in `bireme`; nvext: there, too
    api: Literal["", "openai", "shared", "nvext"] = ""

    @property
    def tensor_names(self) -> tuple[str, ...]:
        if self.tensors is not None:
            return self.tensors
        return (self.name,) if self.data_type else ()

    @property
    def has_range(self) -> bool:
        return self.data_type in ("INT32", "UINT64", "FP32") and not self.is_list

    @property
    def json_type(self) -> Any:
        kind = _PYTHON_TYPES[self.data_type]
        return list[kind] if self.is_list else kind  # type: ignore[valid-type]

    @property
    def range_text(self) -> str:
        bound = "" if math.isinf(self.high) else f" to {self.high:g}"
        return f"{'above' if self.is_low_open else 'from'} {self.low:g}{bound}"

    @property
    def advice(self) -> str:
        """Return the remedy for a value outside the range, in the client's words."""
        return self.remedy if self.remedy or self.off is None else f"{self.off:g} is off"


_P = Parameter
PARAMETERS: tuple[Parameter, ...] = (
    _P("max_tokens", "INT32", low=1, limit="max_tokens", remedy="leave it out for what is left of the context"),
    _P("min_tokens", "INT32", low=0, limit="max_tokens", remedy="lower it", api="shared"),
    _P("temperature", "FP32", low=0, remedy="0 is greedy", is_random=True, openai_high=2, api="openai"),
    _P("top_k", "INT32", low=0, lowest=-1, off=0, is_random=True, api="nvext"),
    _P("top_p", "FP32", low=0, high=1, off=1, is_random=True, api="openai"),
    _P("min_p", "FP32", low=0, high=1, off=0, is_random=True, api="nvext"),
    _P(
        "seed", "UINT64", low=0, lowest=-(2**63), high=MAX_SEED, remedy="send an unsigned 64-bit number",
        is_random=True, tensors=("random_seed", "seed"), api="openai",
    ),
    _P("repetition_penalty", "FP32", low=0, is_low_open=True, off=1, api="nvext"),
    _P("presence_penalty", "FP32", low=-2, high=2, off=0, api="openai"),
    _P("frequency_penalty", "FP32", low=-2, high=2, off=0, api="openai"),
    _P("length_penalty", "FP32", remedy="it has no effect without beams", is_field=False),
    _P("stop", "BYTES", is_list=True, tensors=("stop_words",), api="openai"),
    _P("bad_words", "BYTES", is_list=True, is_field=False),
    _P("stop_token_ids", "INT32", low=0, is_list=True, api="shared"),
    _P("embedding_bias_words", "BYTES", is_list=True, is_field=False),
    _P("embedding_bias_weights", "FP32", low=-100, high=100, off=0, is_list=True, is_field=False),
    _P("end_id", "INT32", low=0, lowest=-1, remedy="-1 is none", is_field=False),
    _P("pad_id", "INT32", is_field=False, is_ignored=True),
    _P("ignore_eos", "BOOL", api="nvext"),
    _P("n", "INT32", low=1, limit="max_n", tensors=("num_return_sequences",), api="openai"),
    _P(
        "beam_width", "INT32", low=1, high=1, is_field=False,
        remedy="beam search is not served; use num_return_sequences for several answers",
    ),
    _P("return_log_probs", "BOOL", is_field=False),
    _P("logprobs", "INT32", low=0, limit="max_logprobs", openai_high=5),  # of completions; a chat's top_logprobs: limit
    _P("prompt_logprobs", "INT32", low=0, limit="max_logprobs"),
    _P("skip_special_tokens", "BOOL", api="shared"),
    _P("include_stop_str_in_output", "BOOL", api="shared"),
    _P("logits_processors", "BYTES"),  # JSON list of {"name": ..., "args": {...}}
    _P("guided_decoding_guide_type", "BYTES", is_field=False),
    _P("guided_decoding_guide", "BYTES", is_field=False),
    _P("priority", "FP32", low=0, high=1, remedy="higher is served first", is_field=False),
    # no tensors of their own
    _P("best_of", api="openai", is_field=False),
    _P("logit_bias", low=-100, high=100, off=0, api="openai"),  # of one entry; those of one token add up
    _P("guided_decoding"),
    _P("lora_name", is_field=False),
    _P("use_beam_search", is_field=False),
    *(
        _P(name, is_field=False, is_ignored=True)
        for name in ("detokenize", "spaces_between_special_tokens", "early_stopping")
    ),
)  # fmt: skip
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
# Names that mean a parameter of another name: random_seed, num_return_sequences, stop_words.
ALIASES = {
    tensor: parameter.name
    for parameter in PARAMETERS
    for tensor in parameter.tensor_names
    if tensor not in BY_NAME
}  # fmt: skip
NAMES = frozenset({*BY_NAME, *ALIASES})
