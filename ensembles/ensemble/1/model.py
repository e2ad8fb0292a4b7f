"""The ensemble model; its behavior is in bireme/pipelines/ensemble.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # the checkout

from bireme.pipelines.ensemble import Ensemble
from bireme.triton import as_triton_model

TritonPythonModel = as_triton_model(Ensemble)
