"""Names that bireme does not use and that other callers of TensorRT-LLM import."""

from __future__ import annotations

import itertools
import time
from typing import Any

from tensorrt_llm import _contract
from tensorrt_llm._encoder import SharedTensorContainer  # noqa: F401
from tensorrt_llm._results import RequestOutput

IMPORTS = {
    "tensorrt_llm._torch.shared_tensor": ("SharedTensorContainer",),
    "tensorrt_llm.executor.result": ("GenerationResult",),
    "tensorrt_llm.inputs.multimodal_data": ("VideoData",),
    "tensorrt_llm.inputs.utils": ("async_load_video",),
    "tensorrt_llm.llmapi.disagg_utils": ("get_global_disagg_request_id",),
    "tensorrt_llm.llmapi.tokenizer": ("tokenizer_factory",),
}
GenerationResult = RequestOutput  # the package's has the text besides
_counter = itertools.count()


class VideoData:
    """A film's frames; no model here takes films."""


async def async_load_video(video: str, **_: Any) -> VideoData:
    raise NotImplementedError(video)


def tokenizer_factory(folder: str, **_: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _snowflake(machine: int, machine_bits: int, counter_bits: int) -> int:
    """Return milliseconds, machine and counter in 63 bits."""
    if not 0 <= machine < 1 << machine_bits:
        raise ValueError(f"machine must be in range [0, {1 << machine_bits})")
    low = machine << counter_bits | next(_counter) % (1 << counter_bits)
    shift = machine_bits + counter_bits
    return int(time.time() * 1e3) % (1 << 63 - shift) << shift | low


if _contract.FROM_1_3:  # from 1.3.0rc22 on the machine is a node and a process

    def get_global_disagg_request_id(node_id: int, process_id: int = 0) -> int:
        return _snowflake(node_id << 6 | process_id, 14, 10)

else:

    def get_global_disagg_request_id(machine_id: int) -> int:
        return _snowflake(machine_id, 10, 12)
