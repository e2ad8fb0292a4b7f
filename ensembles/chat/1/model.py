"""The chat model; its behavior is in bireme/pipelines/chat.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # the checkout

from bireme.pipelines.chat import Chat
from bireme.triton import as_triton_model

TritonPythonModel = as_triton_model(Chat)
