"""The decode model; its behavior is in bireme/stages/decode.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # the checkout

from bireme.stages.decode import Decode
from bireme.triton import as_triton_model

TritonPythonModel = as_triton_model(Decode)
