"""How much text a token can stand for: never less than any token does."""

import asyncio
import random
import sys
import unicodedata

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from bireme.config import Limits, Recipe
from bireme.errors import RequestError
from bireme.messages import Capacity
from bireme.metrics import Registry
from bireme.pipelines.prompts import Prompts
from bireme.text.token_lengths import longest_token_bytes
from bireme.text.tokenizer import load_tokenizer
from bireme.text.vocabulary import byte_characters

BYTES = {character: number for number, character in enumerate(byte_characters())}
FALLBACK = {f"<0x{number:02X}>": number for number in range(256)} | {"▁": 256}
KEPT = pre_tokenizers.ByteLevel(add_prefix_space=False)


def bpe(vocab=BYTES, normalizer=None, pre_tokenizer=KEPT, added=(), **options):
    inner = tokenizers.Tokenizer(models.BPE(dict(vocab), [], **options))
    if normalizer is not None:
        inner.normalizer = normalizer
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    inner.add_tokens(list(added))
    return inner


KNOWN = {
    "bytes": (bpe(), 1),
    "an added token": (bpe(added=["<a long one>"]), 12),
    "NFC": (bpe(normalizer=normalizers.NFC()), 4),
    "split first": (bpe(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), KEPT])), 1),
    "SentencePiece": (
        bpe(FALLBACK, normalizers.Replace(" ", "▁"), None, byte_fallback=True, unk_token="▁", fuse_unk=True), 6,
    ),
}  # fmt: skip
UNKNOWN = {
    "words": tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    "blanks that are dropped": bpe(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), KEPT])),
    "text that is dropped": bpe(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), KEPT])
    ),
    "text that is normalized away": bpe(normalizer=normalizers.Replace("long", "")),
    "blanks at the ends": bpe(normalizer=normalizers.Strip()),
    "a token that takes blanks along": bpe(added=[AddedToken("<x>", lstrip=True)]),
    "a byte without a token": bpe({"a": 0, "b": 1}),
    "no bytes at all": bpe({"a": 0, "b": 1}, pre_tokenizer=None),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_token_stands_for_so_many_bytes_at_most(name):
    inner, longest = KNOWN[name]
    assert longest_token_bytes(inner) == longest


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_a_token_may_stand_for_any_number_there_is_no_bound(name):
    assert longest_token_bytes(UNKNOWN[name]) is None


@pytest.mark.parametrize("model", ["tiny-chat", "tiny-llama", "tiny-vlm"])
def test_no_text_has_fewer_tokens_than_the_bound_says(model):
    tokenizer, draw = load_tokenizer(f"models/{model}"), random.Random(model)
    vocab = list(tokenizer._inner.get_vocab())
    for _ in range(300):
        parts = [draw.choice([" " * draw.randrange(200), draw.choice(vocab), chr(draw.randrange(0xD800)), "the "])]
        text = "".join(parts * draw.randrange(1, 20))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert len(text.encode()) <= len(tokens) * tokenizer.longest_token_bytes


def test_composing_shrinks_no_text_to_less_than_a_quarter():
    changed, parts = {}, set()  # what NFD changes, and what it makes of that: every other character stays as it is
    for character in map(chr, (*range(0xD800), *range(0xE000, sys.maxunicode + 1))):
        if not unicodedata.is_normalized("NFD", character):
            changed[character] = unicodedata.normalize("NFD", character)
            parts.update(changed[character])
    longest = {part: len(part.encode()) for part in parts}  # the most bytes of one that is canonically the same
    for character, plain in changed.items():
        if len(plain) == 1:
            longest[plain] = max(longest[plain], len(character.encode()))
    assert len(changed) > 13_000 and parts.isdisjoint(changed)
    for character in (*changed, *parts):
        source = sum(longest[one] for one in changed.get(character, character))
        assert source <= 4 * len(unicodedata.normalize("NFC", character).encode()), hex(ord(character))


LIMITS = Limits(max_prompt_tokens=1000)
CONTEXT = Capacity(
    max_seq_len=501, max_batch_size=1, max_num_tokens=1, max_queue_size=1, tokens_per_block=1, num_blocks=1,
    vocab_size=1,
)  # fmt: skip


def prompts_with(limits, capacity=None):
    recipe = Recipe(model="m", workers={}, limits=limits)
    return Prompts(load_tokenizer("models/tiny-chat"), recipe, lambda: capacity, Registry("chat"))


@pytest.mark.parametrize(
    "limits, capacity, told",
    [
        (LIMITS, None, r"prompt: 80001 bytes; 1000 tokens \(limits.max_prompt_tokens\) hold 12000 at most"),
        (Limits(), CONTEXT, r"prompt: 80001 bytes; 500 tokens \(the context\) hold 6000 at most"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_without_encoding_it(limits, capacity, told):
    prompts = prompts_with(limits, capacity)
    with pytest.raises(RequestError, match=told):
        asyncio.run(prompts.text(" " * 80_001))


def test_a_chat_that_cannot_fit_is_refused_without_encoding_it():
    prompts = prompts_with(LIMITS)
    with pytest.raises(RequestError, match=r"prompt: \d+ bytes; 1000 tokens"):
        asyncio.run(prompts.chat([{"role": "user", "content": "x" * 80_000}], [], {}))
