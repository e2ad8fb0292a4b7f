"""The logits_processor model; its behavior is in bireme/stages/logits_processor.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # the checkout

from bireme.stages.logits_processor import LogitsProcessor
from bireme.triton import as_triton_model

TritonPythonModel = as_triton_model(LogitsProcessor)
