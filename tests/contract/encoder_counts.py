"""Says what the TensorRT-LLM encoder makes of pictures, as one JSON document on stdout.

    PYTHONPATH=.:tests/contract/stand_in python tests/contract/encoder_counts.py MODEL_FOLDER...

Run in a process of its own, by the python of an environment with the transformers that a TensorRT-LLM image has. The
tower is left out: it is TensorRT-LLM's, and its embeddings are as many as that transformers' image processor says.
"""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import torch
import transformers
from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

from bireme.config import EngineConfig
from bireme.engines.base import EngineContext
from bireme.engines.torch.weights.checkpoint import open_checkpoint
from bireme.engines.trtllm.encoder import HandleEncoder
from bireme.metrics import Registry

SIZES = ((40, 52), (200, 90), (63, 300))


class Tower:
    """Answers as MultimodalEncoder does, with noise for embeddings."""

    def __init__(self, counts: list[int], hidden_size: int) -> None:
        self._counts, self._hidden_size = counts, hidden_size

    def generate(self, inputs: list[dict], use_tqdm: bool) -> list[types.SimpleNamespace]:
        made = [SharedTensorContainer.from_tensor(torch.randn(count, self._hidden_size)) for count in self._counts]
        self._made = made  # whoever lets go of them takes them from their reader
        handles = [[one.dump_to_dict()] for one in made]
        params = [types.SimpleNamespace(multimodal_embedding_handles=one) for one in handles]
        return [types.SimpleNamespace(outputs=[], disaggregated_params=one) for one in params]


def main() -> None:
    print(json.dumps({"transformers": transformers.__version__, "models": [facts(folder) for folder in sys.argv[1:]]}))


def facts(folder: str) -> dict:
    checkpoint = open_checkpoint(folder)
    context = EngineContext(
        worker="multimodal_encoder", stage="multimodal_encoder", model_path=folder, config=EngineConfig(),
        metrics=Registry("multimodal_encoder"),
    )  # fmt: skip
    pixels = [np.full((height, width, 3), 9, np.uint8) for height, width in SIZES]
    plain = HandleEncoder(None, checkpoint, context)
    counts = [plain.prepare(one).num_tokens for one in pixels]
    encoder = HandleEncoder(Tower(counts, plain.hidden_size), checkpoint, context)
    rows = encoder.encode([encoder.prepare(one) for one in pixels])
    return {
        "tokens": [one.num_tokens for one in rows],
        "grids": [encoder.prepare(one).grid for one in pixels],
        "layout": repr(encoder.layout),
        "bytes": [one.num_bytes for one in rows],
    }


if __name__ == "__main__":
    main()
