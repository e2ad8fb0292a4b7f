"""Every recipe's arguments are taken by TensorRT-LLM's own classes: the stand-in's, or the real ones where they are."""

from __future__ import annotations

import pytest

from bireme.config import CHECKOUT
from bireme.engines.trtllm.arguments import complete
from bireme.engines.trtllm.config import llm_arguments
from bireme.engines.trtllm.unions import choose_classes
from bireme.recipe_files import load_recipe

WORKERS = [
    (path.parent.name, stage)
    for path in sorted((CHECKOUT / "recipes").glob("*/recipe.yaml"))
    for stage, entry in load_recipe(path.parent, "").workers.items()
    if entry.engine == "trtllm" and stage != "video_diffusion"
]


@pytest.mark.parametrize(("recipe", "stage"), WORKERS)
def test_a_recipe_s_arguments_are_taken(profile, recipe, stage):
    import tensorrt_llm

    entry = load_recipe(CHECKOUT / "recipes" / recipe, "").workers[stage]
    given = llm_arguments(entry.engine_config, "org/model", stage, tensorrt_llm.__version__)
    args = tensorrt_llm.llmapi.llm_args.TorchLlmArgs(**choose_classes(complete(given).values))
    assert args.model == "org/model"
    for name, value in given.items():
        if not isinstance(value, dict):
            assert getattr(args, name) == value, name
