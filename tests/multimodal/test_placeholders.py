import numpy as np
import pytest

from bireme.errors import RequestError
from bireme.multimodal.placeholders import expand

IDS = np.array([7, 5, 8, 5, 5, 9], np.int32)


def test_each_placeholder_becomes_as_many_as_its_picture_has_tokens():
    expanded, places = expand(IDS, 5, [3, 1, 2])
    assert expanded.tolist() == [7, 5, 5, 5, 8, 5, 5, 5, 9] and places == [1, 5, 6]


def test_a_prompt_without_pictures_stays_as_it_is():
    expanded, places = expand(np.array([1, 2], np.int32), 5, [])
    assert (expanded.tolist(), places, expanded.dtype) == ([1, 2], [], np.int32)


@pytest.mark.parametrize("counts", [[], [1, 2], [1, 1, 1, 1]])
def test_a_template_that_shows_another_number_of_pictures_is_named(counts):
    with pytest.raises(RequestError, match=f"{len(counts)} images, but the model's chat template made places for 3"):
        expand(IDS, 5, counts)
