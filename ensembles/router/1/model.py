"""The router model; its behavior is in bireme/pipelines/router.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # the checkout

from bireme.pipelines.router import Router
from bireme.triton import as_triton_model

TritonPythonModel = as_triton_model(Router)
