"""From a recipe's engine YAML to the keyword arguments of TensorRT-LLM's `LLM`, checked on the way.

Nothing here imports tensorrt_llm or needs a GPU, so that a recipe can be checked anywhere. TensorRT-LLM's own class
looks at the GPU when it is made; contract.py and rules.py replace its checks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bireme.config import EngineConfig, MultimodalConfig
from bireme.engines.trtllm import contract
from bireme.engines.trtllm.engine_yaml import Yaml
from bireme.engines.trtllm.problems import NOTHING, Path, Problem, errors, warnings
from bireme.engines.trtllm.rules import check_rules
from bireme.errors import ConfigError

logger = logging.getLogger("bireme.engines")
_MODEL = "model"  # given by the recipe, so that the contract's class is complete

# Options of trtllm-serve that its configuration files carry as keys -> where LlmArgs has them.
ALIASES: dict[str, Path] = {
    "kv_cache_free_gpu_memory_fraction": ("kv_cache_config", "free_gpu_memory_fraction"),
    "kv_cache_dtype": ("kv_cache_config", "dtype"),
    "tp_size": ("tensor_parallel_size",),
    "pp_size": ("pipeline_parallel_size",),
    "cp_size": ("context_parallel_size",),
    "ep_size": ("moe_expert_parallel_size",),
}
# Keys of ours that stand in the same YAML; TensorRT-LLM must not see them.
OWN: tuple[Path, ...] = (
    ("scheduler_config", "max_queue_size"),
    ("scheduler_config", "max_queue_time_s"),
    ("scheduler_config", "best_effort_share"),
    ("scheduler_config", "max_stream_gap_ms"),
    ("guided_decoding_config",),
    *(("multimodal_config", name) for name in MultimodalConfig.__struct_fields__),
    ("mocker",),
)
# Keys that TensorRT-LLM takes and that have no effect, or harm, with token ids in and out.
_SERVE_ONLY = "trtllm-serve makes text with it; bireme's engine speaks tokens, so it is left out"
LEFT_OUT: dict[str, tuple[str, str]] = {
    "num_postprocess_workers": (_SERVE_ONLY, "remove it"),
    "postprocess_tokenizer_dir": (_SERVE_ONLY, "remove it"),
    "num_serve_frontends": ("these are processes of trtllm-serve, so it is left out", "remove it"),
    "reasoning_parser": (_SERVE_ONLY, "set chat.reasoning_parser in recipe.yaml"),
}
_RECIPE_HAS_IT = "the recipe says it for every part of the deployment"
FOREIGN: dict[str, tuple[str, str]] = {
    "model": (_RECIPE_HAS_IT, "set `model` in recipe.yaml"),
    "tokenizer": (_RECIPE_HAS_IT, "set `tokenizer` in recipe.yaml"),
    "skip_tokenizer_init": ("the engine sets it by the modality", "remove it"),
    "post_processor_hook": ("it rewrites text, and bireme's engine speaks tokens", "remove it"),
    "mm_encoder_only": ("the stage multimodal_encoder sets it", "remove it, and serve that stage"),
    "llm_args": ("TensorRT-LLM's arguments stand at the top of the engine YAML", "move its keys there"),
}


def llm_arguments(config: EngineConfig, model: str, stage: str, version: str = contract.FLOOR) -> dict[str, Any]:
    """Return every keyword argument of `LLM`, of which those that the YAML does not set are absent. Raises ConfigError.

    `stage` is prefill, decode, multimodal_encoder or video_diffusion; `version` is the installed
    tensorrt_llm.__version__. The error has one line each: key, value, reason, remedy. What the contract does not list
    is a warning here, logged once: the package's own classes have the last word.
    """
    transceiver = config.cache_transceiver_config.backend
    found = check_arguments(config.llm_args, stage, version, model, is_disaggregated=transceiver is not None)
    found = [replace(one, severity="warning") if one.is_by_release else one for one in found]
    for warning in warnings(found):
        logger.warning("engine_config_warning stage=%s text=%s", stage, warning)
    if refused := errors(found):
        raise ConfigError("\n".join(map(str, refused)))
    return {"model": model} | prepared(config.llm_args)


def check_arguments(
    tree: Mapping[str, Any],
    stage: str,
    version: str = contract.FLOOR,
    model: str = "",
    *,
    is_disaggregated: bool = False,
) -> list[Problem]:
    """Names, types, values, and rules across them, for one release."""
    release = contract.profile(version)
    if stage == "video_diffusion":
        return _check_video(tree, release)
    found = [*_foreign(tree), *_said_twice(tree), *_left_out(tree)]
    arguments = prepared(tree)
    by_contract = contract.validate(arguments | {"model": _MODEL}, class_of(tree), version)
    sound = _without(arguments, [problem.path for problem in errors(by_contract)])
    return found + by_contract + check_rules(Yaml(sound, stage, release, model, is_disaggregated=is_disaggregated))


def class_of(tree: Mapping[str, Any]) -> str:
    return "AutoDeployLlmArgs" if tree.get("backend") == "_autodeploy" else "LlmArgs"


def prepared(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with aliases resolved, without our keys and dropped ones."""
    result: dict[str, Any] = copy_of(tree)
    for name, path in ALIASES.items():
        if name in result:
            value = result.pop(name)
            put(result, path, value)
    for path in OWN:
        remove(result, path)
    for name in (*LEFT_OUT, *FOREIGN):
        result.pop(name, None)
    return result


def copy_of(tree: Any) -> Any:
    return {key: copy_of(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """A block that is no mapping is left to the contract."""
    *blocks, name = path
    for block in blocks:
        inner = tree.setdefault(block, {})
        if not isinstance(inner, dict):
            return
        tree = inner
    tree.setdefault(name, value)


def remove(tree: dict[str, Any], path: Path) -> None:
    name, *rest = path
    inner = tree.get(name)
    if not rest:
        tree.pop(name, None)
    elif isinstance(inner, dict) and rest[0] in inner:
        remove(inner, tuple(rest))
        if not inner:
            del tree[name]


def value_at(tree: Any, path: Path) -> Any:
    for name in path:
        tree = tree.get(name, NOTHING) if isinstance(tree, Mapping) else NOTHING
    return tree


def _foreign(tree: Mapping[str, Any]) -> list[Problem]:
    return [Problem((name,), tree[name], *why) for name, why in FOREIGN.items() if name in tree]


def _left_out(tree: Mapping[str, Any]) -> list[Problem]:
    return [Problem((name,), tree[name], *why, "warning") for name, why in LEFT_OUT.items() if name in tree]


def _said_twice(tree: Mapping[str, Any]) -> list[Problem]:
    found = []
    for name, path in ALIASES.items():
        own = value_at(tree, path)
        if name in tree and own is not NOTHING and own != tree[name]:
            reason = f"it is another name of {'.'.join(path)}, which is {own!r}"
            found.append(Problem((name,), tree[name], reason, "keep one of the two"))
    return found


def _without(tree: dict[str, Any], paths: list[Path]) -> dict[str, Any]:
    """So that rules meet only values of the right type."""
    result: dict[str, Any] = copy_of(tree)
    for path in paths:
        *blocks, name = path
        inner = value_at(result, tuple(blocks))
        if isinstance(inner, dict):
            inner.pop(name, None)
    return result


def _check_video(tree: Mapping[str, Any], release: str) -> list[Problem]:
    if release < "1.3":
        reason = f"TensorRT-LLM {release} has no VisualGen"
        return [Problem((), NOTHING, reason, "set engine_version: '1.3' and run that release, or use engine: torch")]
    return [*_foreign(tree), *contract.validate(dict(tree) | {"model": _MODEL}, "VisualGenArgs", release)]
