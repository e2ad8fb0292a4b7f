"""The multimodal_encoder model; its behavior is in bireme/stages/multimodal_encoder.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # the checkout

from bireme.stages.multimodal_encoder import MultimodalEncoder
from bireme.triton import as_triton_model

TritonPythonModel = as_triton_model(MultimodalEncoder)
