"""Serves a stage or a pipeline as a Triton Python model. The only package that imports Triton's module."""

from __future__ import annotations

from typing import Any

from bireme.types import Stage


def as_triton_model(stage_class: type[Stage]) -> type[Any]:
    """Return the class that a model.py offers to Triton as TritonPythonModel."""
    from bireme.triton.adapter import Adapter  # Triton's module exists in its stubs only

    return type("TritonPythonModel", (Adapter,), {"stage_class": stage_class, "spec": stage_class.spec})
