"""The kinds of engines, as facts that other code asks for instead of an engine's name.

A kind is an entry here and a package bireme/engines/<name>, from which engines/registry.py makes its engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EngineName = Literal["torch", "trtllm", "mocker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    needs_model: bool = True  # a model's files; without them it takes no pictures either
    reads_gguf: bool = False  # weights in GGUF files
    moves_own_kv: bool = False  # without our `KvTransfer`
    has_llm_args: bool = False  # its YAML holds TensorRT-LLM's arguments, which have checks of their own
    makes_embeddings: bool = False  # serves the stage `embedding`
    scores_prompts: bool = True  # log probabilities of the prompt's own tokens
    rests_best_effort: bool = True  # requests of priority 0 sit out steps for others (best_effort.py)
    tells_prices: bool = False  # with its load, what prompts cost it
    has_footprint: bool = False  # its memory is counted before it starts (launch/footprint)
    follows_triggers: bool = False  # guides that a token begins (`trigger` of guided_decoding)
    modules: tuple[str, ...] = ()  # imported by its process
    remedy: str = ""  # how to get these
    video_modules: tuple[str, ...] = ()  # imported besides, to make videos
    quick_config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # stage -> what serve.py --model sets


ENGINE_KINDS: dict[EngineName, EngineKind] = {
    "torch": EngineKind(
        reads_gguf=True,
        makes_embeddings=True,
        tells_prices=True,
        follows_triggers=True,
        has_footprint=True,
        modules=("torch", "transformers", "safetensors"),
        remedy="pip install -e .[torch]",
        video_modules=("diffusers", "accelerate"),
    ),
    "trtllm": EngineKind(
        moves_own_kv=True,
        has_llm_args=True,
        scores_prompts=False,
        rests_best_effort=False,
        modules=("tensorrt_llm",),
        remedy="use the image that docker/Dockerfile.trtllm makes, or name an environment that has it in"
        " BIREME_ENGINE_PYTHON",
        quick_config={  # unchunked, prompts beyond max_num_tokens are refused; 1.2 overlaps nothing where it prefills
            "prefill": {"enable_chunked_prefill": True, "disable_overlap_scheduler": True},
            "decode": {"enable_chunked_prefill": True},
        },
    ),
    "mocker": EngineKind(needs_model=False),
}
