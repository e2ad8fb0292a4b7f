"""The tensorrt_llm_bls model; its behavior is in bireme/pipelines/tensorrt_llm_bls.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # the checkout

from bireme.pipelines.tensorrt_llm_bls import TensorrtLlmBls
from bireme.triton import as_triton_model

TritonPythonModel = as_triton_model(TensorrtLlmBls)
