"""The pages about TensorRT-LLM name keys, metrics, files and options that exist."""

from __future__ import annotations

import re

import pytest

from bireme.config import CHECKOUT
from bireme.engines.trtllm import contract
from bireme.metrics import TABLE

PAGES = [CHECKOUT / "docs" / "trtllm.md", CHECKOUT / "docs" / "tuning.md"]
PAGES += sorted((CHECKOUT / "recipes").glob("*/README.md"))


def words_of(page):
    """Return what stands in backticks."""
    return re.findall(r"`([^`\n]+)`", page.read_text())


def key_exists(key):
    """Whether a dotted key is one of LlmArgs' in some release; of a union, of one of its classes."""
    names = {"LlmArgs"}
    for part in key.split("."):
        found = [contract.all_fields(name, release) for name in names for release in contract.PROFILES]
        types = [fields[part].type for fields in found if part in fields]
        if not types:
            return False
        names = {name for one in types for name in classes_of(one.class_name)}
    return True


def classes_of(name):
    if not name:
        return []
    return list(contract.contract()["config_classes"][name].get("classes", {}).values()) or [name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_dotted_keys_are_in_the_contract(page):
    own = (
        "scheduler_config.max_queue_size",
        "scheduler_config.best_effort_share",
        "scheduler_config.max_stream_gap_ms",
        "moe_config.load_balancer.num_slots",
    )
    blocks = [f"{name}." for name in contract.fields("LlmArgs") if name.endswith("_config")]
    keys = [re.split(r"[:\s=]", word)[0] for word in words_of(page) if word.startswith(tuple(blocks))]
    assert [key for key in keys if key not in own and not key_exists(key)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_metrics_are_in_the_table(page):
    names = set(re.findall(r"\b(?:bireme|trtllm)_[a-z_]+[a-z]\b", page.read_text()))
    ours = {"trtllm_backend"}
    unknown = {name for name in names - ours if name not in TABLE and not any(one.startswith(name) for one in TABLE)}
    assert unknown == set()


def test_files_that_the_pages_name_exist():
    foreign = ("docs/introduction/compatibility.md", "docs/pages/", "examples/")
    for page in PAGES[:2]:
        named = re.findall(r"(?<![\w/])(?:bireme|tools|docker|recipes|docs|tests)/[\w./-]+\w", page.read_text())
        assert [name for name in named if not name.startswith(foreign) and not (CHECKOUT / name).exists()] == []


def test_the_page_names_the_image_that_the_dockerfile_is_made_from():
    (tag,) = re.findall(r"^ARG TRITON_TAG=(\S+)", (CHECKOUT / "docker" / "Dockerfile.trtllm").read_text(), re.M)
    assert f"tritonserver:{tag}" in PAGES[0].read_text()
