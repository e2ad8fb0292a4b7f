"""The embedding model; its behavior is in bireme/stages/embedding.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # the checkout

from bireme.stages.embedding import Embedding
from bireme.triton import as_triton_model

TritonPythonModel = as_triton_model(Embedding)
