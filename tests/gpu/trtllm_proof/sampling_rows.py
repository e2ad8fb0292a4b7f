"""Rows of what decides each token: log probabilities, sampling, penalties, biases, processors and guides."""

from __future__ import annotations

import random
import re

from bireme.messages import ProcessorCall
from bireme.text.tokenizer import load_tokenizer
from tests.gpu.trtllm_proof.bench import NEARLY, Bench, check_logprob, require

GUIDES = [
    ({"choice": ["a.b (c)", "[x]-{2}"]}, r"a\.b \(c\)|\[x\]-\{2\}"),
    ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
    ({"grammar": 'root ::= "<" [0-9] [0-9] ">"'}, "<[0-9]{2}>"),
    (
        {"json": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}},
        r'\s*\{\s*"n"\s*:\s*[12]\s*\}',
    ),
]


def log_probabilities(bench: Bench) -> str:
    done = bench.ask(bench.prompt(), max_tokens=6, logprobs=3, ignore_eos=True)
    require(len(done.logprobs) == 6, f"{len(done.logprobs)} entries for 6 tokens")
    expected = bench.logits_of(done).log_softmax(-1)
    for token, entry, row in zip(done.tokens, done.logprobs, expected, strict=True):
        require(entry[0].token == token, f"an entry begins with {entry[0].token}, and the token is {token}")
        require(len(entry) == 4, f"{len(entry) - 1} alternatives, 3 were asked for")
        for item in entry:
            check_logprob(item.token, item.logprob, row)
        least = float(row.topk(3).values[-1])
        require(all(row[item.token] > least - NEARLY for item in entry[1:]), "an alternative is not among the best")
    return "those of the reference, within 0.25"


def prompt_log_probabilities(bench: Bench) -> str:
    done = bench.ask(bench.prompt(), max_tokens=1, prompt_logprobs=1)
    entries = done.answer.prompt_logprobs
    require(entries is not None, "none came")
    assert entries is not None
    count = len(done.prompt) - 1
    require(len(entries) == count, f"{len(entries)} entries, {count} prompt tokens have one")
    expected = bench.logits(done.prompt).log_softmax(-1)
    for entry, row in zip(entries, expected, strict=False):
        require(len(entry) > 1, "an entry without the likeliest token")
        check_logprob(entry[1].token, entry[1].logprob, row)
        require(float(row.max() - row[entry[1].token]) < NEARLY, "an entry's token is not the likeliest")
    return f"{count} entries, those of the reference"


def sampling(bench: Bench) -> str:
    is_random = False
    for _ in range(2):
        done = bench.ask(bench.prompt(), max_tokens=12, temperature=2.0, top_k=5, ignore_eos=True)
        for token, row in zip(done.tokens, bench.logits_of(done), strict=True):
            best = row.topk(5).values
            require(float(row[token]) > float(best[-1]) - NEARLY, f"top_k 5: token {token} is not among the best 5")
            is_random |= float(row[token]) < float(best[0]) - NEARLY
    require(is_random, "24 tokens at temperature 2, each the likeliest")
    return "24 tokens among the best 5, not all of them the best"


def seeds(bench: Bench) -> str:
    if "seed" in bench.api.unheeded:
        return f"refused: {bench.refusal(temperature=1.0, seed=5)[:80]}"
    for _ in range(2):
        prompt = bench.prompt()
        answers = [bench.ask(prompt, temperature=2.0, seed=seed, ignore_eos=True).tokens for seed in (5, 5, 6)]
        require(answers[0] == answers[1], "one seed gave two answers")
        require(answers[0] != answers[2], "two seeds gave one answer")
    return "one seed gives one answer"


def penalties(bench: Bench) -> str:
    _check_repetition(bench)
    prompt, token, needed, at = _pushed(bench)
    push = {"logit_bias": {token: needed}, "max_tokens": 8, "ignore_eos": True}
    plain = bench.ask(prompt, **push).tokens
    require(plain == [token] * 8, f"a bias of {needed:.1f} on token {token} did not give it 8 times, but {plain}")
    for name in ("presence_penalty", "frequency_penalty"):
        tokens = bench.ask(prompt, **push, **{name: 2.0}).tokens
        require(tokens[: at + 1] != [token] * (at + 1), f"{name} 2.0 changed nothing")
    return "repetition, presence and frequency change the choice"


def _check_repetition(bench: Bench) -> None:
    """One below 1 draws tokens of the prompt: which one, is known."""
    penalty, prompt = 0.1, bench.prompt()
    row = bench.logits(prompt)[-1].clone()
    inside = sorted(set(prompt))
    values = row[inside]
    row[inside] = (values / penalty).where(values > 0, values * penalty)
    token = bench.ask(prompt, max_tokens=1, repetition_penalty=penalty).tokens[0]
    require(float(row.max() - row[token]) < NEARLY / penalty, f"repetition_penalty {penalty}: token {token} was chosen")


def _pushed(bench: Bench) -> tuple[list[int], int, float, int]:
    """Return a prompt, a token, the bias with which it comes 8 times, by 1 at the least, and where it is by 1."""
    draw = random.Random(1)
    prompt = bench.prompt()
    while True:
        token = draw.randrange(1000, bench.engine.capacity.vocab_size)
        rows = bench.logits([*prompt, *[token] * 7])[len(prompt) - 1 :]
        missing = [float(row.max() - row[token]) for row in rows]
        at = missing.index(max(missing))
        if at:  # penalties begin with the second
            return prompt, token, max(missing) + 1.0, at


def bias(bench: Bench) -> str:
    tokens = bench.ask(bench.prompt(), logit_bias={777: 100.0}, max_tokens=3).tokens
    require(tokens == [777] * 3, f"a bias of 100 on token 777 gave {tokens}")
    return "a bias decides"


def bad_words(bench: Bench) -> str:
    first, second = bench.greedy.tokens[:2]
    done = bench.ask(bench.greedy.prompt, bad_token_ids=((first,),), max_tokens=12, ignore_eos=True)
    require(first not in done.tokens, f"token {first} came, and was forbidden")
    done = bench.ask(bench.greedy.prompt, bad_token_ids=((first, second),), max_tokens=12, ignore_eos=True)
    pairs = list(zip(done.tokens, done.tokens[1:], strict=False))
    require((first, second) not in pairs, f"tokens {first}, {second} came one after the other")
    return "one token and two in a row are kept out"


def processors(bench: Bench) -> str:
    allowed = (ProcessorCall("allowed_tokens", {"token_ids": [811, 812]}),)
    tokens = bench.ask(bench.prompt(), logits_processors=allowed, max_tokens=6).tokens
    require(tokens and set(tokens) <= {811, 812}, f"allowed were 811 and 812, and {tokens} came")
    forced = (ProcessorCall("forced_sequence", {"token_ids": [811, 900, 813]}),)
    tokens = bench.ask(bench.prompt(), logits_processors=forced).tokens
    require(tokens == [811, 900, 813], f"forced were 811, 900, 813, and {tokens} came")
    return "one that does not look at the tokens, and one that does"


def guides(bench: Bench) -> str:
    tokenizer = load_tokenizer(str(bench.model))
    for guide, pattern in GUIDES:
        done = bench.ask(bench.prompt(), guided_decoding=guide, max_tokens=64)
        (kind,) = guide
        text = tokenizer.decode(done.tokens)
        require(re.fullmatch(pattern, text), f"{kind}: {text!r} is no match of {pattern}")
        require(done.finish.reason == "stop", f"{kind}: it ended with {done.finish.reason}")
    return "choice, regex, grammar, json"
