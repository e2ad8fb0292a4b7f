import pytest
import torch

from bireme.logits import filters

torch.set_num_threads(1)


def scaled(seed, spread, size=3000) -> torch.Tensor:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(seed)) * spread
    logits = (logits * 8).round() / 8 if seed % 2 else logits  # with ties, as in bf16
    return filters.scale(logits, torch.ones(4, 1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("top_k", [1, 7, 500, 3000])
def test_a_row_alone_has_the_nucleus_that_it_has_in_a_batch(seed, spread, top_k):
    values = scaled(seed, spread)
    top_k_R1, top_p_R1 = torch.full((4, 1), top_k), torch.tensor([[0.0], [0.4], [0.9], [0.999]])
    by_row = filters.top_p_threshold(values, top_k_R1, top_p_R1)
    torch.testing.assert_close(by_row, filters.nucleus_of_batch(values, top_k_R1, top_p_R1), rtol=1e-5, atol=1e-5)


def test_a_nucleus_is_the_smallest_set_that_reaches_p():
    values = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    for top_p, smallest in ((0.4, 0.5), (0.6, 0.25), (0.8, 0.125), (0.99, 0.125)):
        threshold = filters.top_p_threshold(values, torch.tensor([[4]]), torch.tensor([[top_p]]))
        assert threshold.exp().item() == pytest.approx(smallest)


def test_a_draw_at_the_end_of_the_distribution_takes_a_possible_token():
    values = torch.tensor([[0.0, -1.0, float("-inf")]])
    for number in (0.0, 1.0 - 2.0**-53):
        assert filters.draw(values.clone(), None, torch.tensor([[number]])).item() == (0 if number == 0 else 1)
