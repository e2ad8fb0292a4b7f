import pytest
import torch

from bireme.multimodal.mrope import rope_positions
from bireme.multimodal.wire import OpenedItem

PLACEHOLDER = 5


@pytest.fixture(scope="module")
def oracle():
    """transformers' own, of a model that is never run."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": 32, "num_key_value_heads": 2}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16, "intermediate_size": 16}
    ids = {"image_token_id": PLACEHOLDER, "vision_start_token_id": 6, "vision_end_token_id": 7, "video_token_id": 8}
    return Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


@pytest.mark.parametrize(
    "parts",
    [
        [4, (4, 4), 3],
        [0, (2, 8), 1],
        [5, (8, 4), 0, (6, 10), 7],
        [2, (2, 2), 1, (2, 2), 1, (4, 6), 9],
    ],
)
def test_positions_equal_those_of_transformers(oracle, parts):
    """`parts`: numbers of text tokens, and grids of patches (height, width)."""
    ids, items, grids = [], [], []
    for part in parts:
        if isinstance(part, int):
            ids += [9] * part
            continue
        height, width = part
        count = height * width // 4
        items.append(OpenedItem("0" * 64, count, len(ids) + 1, (1, height, width), None))
        grids.append([1, height, width])
        ids += [6, *[PLACEHOLDER] * count, 7]
    row = torch.tensor([ids])
    expected, delta = oracle.get_rope_index(
        row,
        mm_token_type_ids=(row == PLACEHOLDER).int(),
        image_grid_thw=torch.tensor(grids),
        attention_mask=torch.ones_like(row),
    )
    found = rope_positions(len(ids), items, 2)
    assert found.tolist() == expected[:, 0].tolist()
    assert int(found[:, -1].max()) + 1 - len(ids) == int(delta[0, 0])


def test_text_alone_counts_up():
    assert rope_positions(4, [], 2).tolist() == [[0, 1, 2, 3]] * 3
