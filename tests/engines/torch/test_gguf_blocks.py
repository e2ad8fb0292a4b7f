"""Blocks of each type are the numbers that the gguf package makes of them."""

import gguf
import numpy as np
import pytest
import torch

from bireme.engines.torch.weights.gguf_blocks import dequantize
from bireme.gguf.head import TYPES

NUM_BLOCKS = 64
HALVES = {  # where a block has float16 numbers, which random bytes would make infinite
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def random_blocks(block_type, random):
    blocks = random.integers(0, 256, (NUM_BLOCKS, block_type.num_bytes), dtype=np.uint8)
    if block_type.name in ("F32", "F16", "BF16"):
        values = random.standard_normal((NUM_BLOCKS, 1)).astype(np.float32)
        return gguf.quantize(values, gguf.GGMLQuantizationType[block_type.name]).view(np.uint8).reshape(blocks.shape)
    for at in HALVES[block_type.name]:
        blocks[:, at : at + 2] = random.standard_normal((NUM_BLOCKS, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize(
    "block_type", [found for found in TYPES.values() if found.name != "Q8_K"], ids=lambda t: t.name
)
def test_random_blocks_are_what_the_gguf_package_makes_of_them(block_type):
    blocks = random_blocks(block_type, np.random.default_rng(7))
    found = dequantize(torch.from_numpy(blocks), block_type.name)
    wanted = gguf.dequantize(blocks, gguf.GGMLQuantizationType[block_type.name])
    assert found.dtype == torch.float32
    assert found.shape == (NUM_BLOCKS, block_type.num_values)
    assert np.array_equal(found.numpy(), wanted)


def test_a_block_of_q8_k_is_a_float32_scale_and_256_numbers():
    quants = np.arange(-128, 128, dtype=np.int8)
    block = np.concatenate([np.float32([0.25]).view(np.uint8), quants.view(np.uint8), np.zeros(32, np.uint8)])
    assert dequantize(torch.from_numpy(block[None]), "Q8_K")[0].tolist() == (quants * 0.25).tolist()
