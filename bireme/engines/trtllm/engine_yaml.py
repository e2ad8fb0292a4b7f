"""An engine YAML as the rules across its fields read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from bireme.engines.trtllm.problems import NOTHING, Problem

Tree = Mapping[str, Any]
_DEFAULT_GRAPH_BATCH = 128
NO_DRAFTS = 0


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Yaml:
    """One worker's engine YAML with TensorRT-LLM's defaults where the rules need them."""

    def __init__(self, tree: Tree, stage: str, release: str, model: str = "", *, is_disaggregated: bool) -> None:
        self.tree = tree
        self.stage = stage
        self.release = release
        self.model = model  # a folder, or a name on the hub
        self.is_disaggregated = is_disaggregated

    def get(self, key: str, default: Any = None) -> Any:
        """`key`: dotted; the default where it, or a block above it, is missing or null."""
        found: Any = self.tree
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found

    def number(self, key: str, default: Any = None) -> Any:
        """What is no number counts as missing, so do infinity and NaN."""
        found = self.get(key)
        is_number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
        return found if is_number else default

    def block(self, key: str) -> Tree:
        found = self.get(key)
        return found if isinstance(found, Mapping) else {}

    def problem(self, key: str, reason: str, remedy: str, *, is_warning: bool = False) -> Problem:
        value = self.get(key, NOTHING)
        return Problem(tuple(key.split(".")), value, reason, remedy, "warning" if is_warning else "error")

    def without(self, keys: Iterable[str]) -> Yaml:
        tree = {key: value for key, value in self.tree.items() if key not in keys}
        return Yaml(tree, self.stage, self.release, self.model, is_disaggregated=self.is_disaggregated)

    @property
    def is_autodeploy(self) -> bool:
        return bool(self.get("backend") == "_autodeploy")

    @property
    def tensor_parallel_size(self) -> int:
        return int(self.number("tensor_parallel_size", 1))

    @property
    def world_size(self) -> int:
        if self.is_autodeploy:
            return int(self.number("world_size", self.tensor_parallel_size))
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        first, second, third = (int(self.number(name, 1)) for name in sizes)
        return first * second * third

    @property
    def prefills(self) -> bool:
        """Whether prompts are computed here: not on a decode worker that gets its KV from prefill."""
        return self.stage == "prefill" or not self.is_disaggregated

    @property
    def hands_kv_over(self) -> bool:
        """Whether KV goes from here to another engine, or comes from one."""
        return self.is_disaggregated and self.stage in ("prefill", "decode")

    @property
    def draft_len(self) -> int:
        """Draft tokens for each sure one."""
        if self.get("speculative_config.decoding_type") == "MTP":
            own = self.number("speculative_config.num_nextn_predict_layers")
            return int(own or self.number("speculative_config.max_draft_len", 1))
        return int(self.number("speculative_config.max_draft_len", NO_DRAFTS))

    @property
    def largest_graph_batch(self) -> int:
        """The largest batch that a CUDA graph will be captured for; 0: CUDA graphs are off."""
        if "cuda_graph_config" in self.tree and self.tree["cuda_graph_config"] is None:
            return 0
        sizes = [size for size in self.get("cuda_graph_config.batch_sizes", ()) if isinstance(size, int)]
        largest = max(sizes) if sizes else self.number("cuda_graph_config.max_batch_size") or _DEFAULT_GRAPH_BATCH
        return int(min(largest, self.number("max_batch_size", largest)))
