"""Recipe workers whose engine is TensorRT-LLM's stand-in (or the real one, where it is installed)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

STAND_IN = Path(__file__).parent / "stand_in"
CHECKOUT = Path(__file__).resolve().parents[2]
PROFILES = ("1.2.1", "1.3", "1.4")


def is_real_there() -> bool:
    """Is a real tensorrt_llm installed? Then tests run on it, and the stand-in stays off the path."""
    found = importlib.util.find_spec("tensorrt_llm")
    return found is not None and str(STAND_IN) not in str(found.origin)


@contextlib.contextmanager
def imported(profile: str) -> Iterator[None]:
    """In this process `tensorrt_llm` is the stand-in as one release, imported anew, and nothing behind it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRTLLM_STAND_IN", profile)
        patched.syspath_prepend(str(STAND_IN))
        _forget()
        yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def environment(profile: str = "1.2.1", **variables: str) -> dict[str, str]:
    """Return what an engine process needs to find the stand-in; `variables`: TRTLLM_STAND_IN_..., by their ends."""
    if is_real_there():
        return {}
    settings = {f"TRTLLM_STAND_IN_{name}": value for name, value in variables.items()}
    return {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(STAND_IN)]), "TRTLLM_STAND_IN": profile} | settings


def worker(config: dict[str, Any], profile: str = "1.2.1", **variables: str) -> dict[str, Any]:
    """Return a worker entry: this engine YAML on engine trtllm, with the sampler that heeds seeds."""
    plain = {"enable_chunked_prefill": True, "disable_overlap_scheduler": True}
    if profile == "1.2.1":
        plain["sampler_type"] = "TRTLLMSampler"
    return {
        "engine": "trtllm",
        "engine_version": profile[:3],
        "num_threads": 1,
        "env": environment(profile, **variables),
        "engine_config": plain | config,
    }


def copy_recipe(recipe: str, folder: Path, profile: str = "1.2.1") -> str:
    """Write a recipe of the repository with each worker on this engine into `folder`; return the folder."""
    source = CHECKOUT / recipe
    tree = yaml.safe_load((source / "recipe.yaml").read_text())
    config = yaml.safe_load((source / "engine.yaml").read_text()) | {"guided_decoding_backend": "xgrammar"}
    tree["workers"] = dict.fromkeys(tree["workers"], worker(config, profile))
    tree = {"served_model_name": source.name} | tree | {"model": str(CHECKOUT / tree["model"])}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return str(folder)
