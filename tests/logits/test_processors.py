import pytest
import torch

from bireme.errors import RequestError
from bireme.logits.base import ProcessorContext
from bireme.logits.registry import create
from bireme.messages import ProcessorCall

hf = pytest.importorskip("transformers.generation.logits_process")

VOCAB, PROMPT = 50, [3, 7, 7, 11]
OUTPUTS = [[], [7], [7, 7, 20, 21]]
SEEDS = range(5)


def made(name, **args):
    context = ProcessorContext("r1", VOCAB, len(PROMPT), eos_ids=(2,))
    return create([ProcessorCall(name, args)], context)[0]


def logits(seed):
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def assert_equal(ours, theirs, tokens, seed):
    mine, expected = logits(seed), theirs(torch.tensor([tokens]), logits(seed).unsqueeze(0))[0]
    ours(tokens, mine)
    torch.testing.assert_close(mine, expected)


CASES = [
    ("temperature", {"temperature": 0.3}, lambda: hf.TemperatureLogitsWarper(0.3)),
    ("repetition_penalty", {"penalty": 1.3}, lambda: hf.RepetitionPenaltyLogitsProcessor(1.3)),
    ("repetition_penalty", {"penalty": 0.7}, lambda: hf.RepetitionPenaltyLogitsProcessor(0.7)),
    (
        "logit_bias",
        {"bias": {"4": 2.5, "9": -100.0}},
        lambda: hf.SequenceBiasLogitsProcessor([[[4], 2.5], [[9], -100.0]]),
    ),
    (
        "bad_words",
        {"sequences": [[5], [7, 9], [7, 20, 21, 8]]},
        lambda: hf.NoBadWordsLogitsProcessor([[5], [7, 9], [7, 20, 21, 8]], eos_token_id=2),
    ),
    ("min_tokens", {"min_tokens": 2}, lambda: hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, 2, device="cpu")),
    ("top_k", {"top_k": 5}, lambda: hf.TopKLogitsWarper(5)),
    ("top_p", {"top_p": 0.6}, lambda: hf.TopPLogitsWarper(0.6)),
    ("top_p", {"top_p": 0.0}, lambda: hf.TopPLogitsWarper(0.0)),
    ("top_p", {"top_p": 1.0}, lambda: hf.TopPLogitsWarper(1.0)),
    ("min_p", {"min_p": 0.1}, lambda: hf.MinPLogitsWarper(0.1)),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("name", "args", "theirs"), CASES)
def test_a_processor_does_what_transformers_does(name, args, theirs, output, seed):
    assert_equal(made(name, **args), theirs(), PROMPT + output, seed)


def test_presence_and_frequency_count_the_output_alone():
    row, expected = logits(0), logits(0)
    made("presence_penalty", penalty=0.5)(PROMPT + [7, 7, 20], row)
    made("frequency_penalty", penalty=0.25)(PROMPT + [7, 7, 20], row)
    expected[7] -= 0.5 + 2 * 0.25
    expected[20] -= 0.5 + 0.25
    torch.testing.assert_close(row, expected)


def test_only_allowed_tokens_stay():
    row = logits(0)
    made("allowed_tokens", token_ids=[4, 9])(PROMPT, row)
    assert torch.isfinite(row).nonzero().flatten().tolist() == [4, 9]


def test_a_forced_sequence_comes_in_order_and_then_the_end():
    forced, tokens = made("forced_sequence", token_ids=[10, 11]), list(PROMPT)
    for _ in range(4):
        row = logits(len(tokens))
        forced(tokens, row)
        tokens.append(int(row.argmax()))
    assert tokens[len(PROMPT) :] == [10, 11, 2, 2]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("temperatur", {"temperature": 1.0}, "did you mean temperature"),
        ("temperature", {}, "missing a required argument: 'temperature'; its arguments: temperature"),
        ("temperature", {"temperature": 1.0, "top": 2}, "unexpected keyword argument 'top'"),
        ("temperature", {"temperature": 0}, "above 0"),
        ("temperature", {"temperature": float("nan")}, "finite"),
        ("temperature", {"temperature": "hot"}, "'hot'; a finite number"),
        ("top_p", {"top_p": 1.5}, "at most 1"),
        ("top_k", {"top_k": 0}, "at least 1"),
        ("logit_bias", {"bias": {"50": 1.0}}, "50 is not a token id, 0 to 49"),
        ("logit_bias", {"bias": [1]}, "object of token id"),
        ("bad_words", {"sequences": [[]]}, "empty"),
        ("bad_words", {"sequences": [[-1]]}, "-1 is not a token id"),
        ("allowed_tokens", {"token_ids": []}, "at least one token"),
        ("allowed_tokens", {"token_ids": "abc"}, "list of token ids"),
    ],
)
def test_wrong_arguments_are_refused_with_the_reason(name, args, message):
    with pytest.raises(RequestError, match=message):
        made(name, **args)
