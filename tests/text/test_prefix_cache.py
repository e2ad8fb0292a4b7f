"""A text cut at certain places has the tokens of its parts; what texts begin with in common is encoded once."""

from __future__ import annotations

import asyncio
import random
import threading
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from bireme.config import Limits
from bireme.errors import ResourceExhaustedError
from bireme.metrics import Registry
from bireme.text.cuts import KNOWN_SPLITS, cut_pattern, cuts
from bireme.text.prefix_cache import PrefixCache
from bireme.text.prompt_encoder import PromptEncoder
from bireme.text.tokenizer import load_tokenizer
from tests.text.test_encoder import CORPUS, SPLIT

WORDS = "the quick brown fox jumps over the lazy dog and back again "
CHAT = [AddedToken("<|im_start|>", special=True, normalized=False), AddedToken("<|im_end|>", special=True)]
PIECES = [
    "<|im_start|>", "<|im_end|>", "<|im_", "start|>", "the ", " fox", "a b", "A  b", " a", "b ", "don't ", "x's y",
    "123 ", "4", "\n", "\r\n ", "\t", " ", "  ", ".", " !", "(a) ", "e\u0301 ", "\u0301", "é e", "东 京", "京", "🙂",
    "\u00a0a", "▁the", "Ġa", "’s ", "ﬁ ", "[SEP]", "</s>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=40).map("".join)


def trained(tokenizer, trainer, added=CHAT):
    tokenizer.train_from_iterator([*CORPUS, WORDS], trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def bpe(**model):
    return models.BPE(**model), trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), "▁"]
    )


def byte_bpe(pre_tokenizer, normalizer=None, added=CHAT, **model):
    inner, trainer = bpe(**model)
    tokenizer = Tokenizer(inner)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return trained(tokenizer, trainer, added)


def split(*patterns):
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, bytes_alone])


def metaspace(**options):
    inner, trainer = bpe(byte_fallback=True)
    tokenizer = Tokenizer(inner)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trained(tokenizer, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**options)
    return tokenizer


def sentence_piece(*steps):
    """As Llama 2 and Gemma: spaces are marked by the normalizer, and nothing splits the text."""
    inner, trainer = bpe(byte_fallback=True)
    tokenizer = Tokenizer(inner)
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained(tokenizer, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def of_words(model, trainer, normalizer, pre_tokenizer):
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    return trained(tokenizer, trainer)


OF_WORDS = [pattern for pattern in sorted(KNOWN_SPLITS) if r"\p{L" in pattern]
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
AT_WORDS = {
    "gpt2": lambda: byte_bpe(GPT2),
    "llama3": lambda: byte_bpe(split(SPLIT.replace("\n", "")), ignore_merges=True),
    "qwen": lambda: byte_bpe(split(SPLIT.replace("{1,3}", "")), normalizers.NFC()),
    "metaspace_first": lambda: metaspace(prepend_scheme="first", split=False),
    "metaspace_always": lambda: metaspace(prepend_scheme="always"),
    "gemma": sentence_piece,
    "deepseek": lambda: byte_bpe(split(*sorted(KNOWN_SPLITS, key=len))),
    **{f"split_{number}": partial(byte_bpe, split(pattern)) for number, pattern in enumerate(OF_WORDS)},
}
AT_TOKENS = {
    "llama2": lambda: sentence_piece(normalizers.Prepend("▁")),
    "prefix_space": lambda: byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "own_regex": lambda: byte_bpe(split(r"\w+ \w+|\s|.")),
    "unigram": lambda: of_words(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False),
        normalizers.NFKC(),
        pre_tokenizers.Metaspace(),
    ),
    "bert": lambda: of_words(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(special_tokens=["[UNK]"], show_progress=False),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    ),
}
ALL = AT_WORDS | AT_TOKENS


@cache
def tokenizer_of(name):
    """Not made at the import: training `unigram` starts threads."""
    return ALL[name]()


def plain(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def caching(tokenizer, max_bytes=1 << 20, part_characters=4):
    return PrefixCache(plain(tokenizer), cut_pattern(tokenizer), max_bytes, part_characters=part_characters)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=50, deadline=None)
@given(texts=st.lists(TEXTS, min_size=2, max_size=3), end=TEXTS)
def test_tokens_are_those_of_the_whole_text(name, texts, end):
    cache, encode = caching(tokenizer_of(name)), plain(tokenizer_of(name))
    for text in ("".join(texts), "".join(texts) + end, texts[0] + end, "".join(texts)):
        assert cache.encode(text).tolist() == encode(text)


@pytest.mark.parametrize("folder", ["tiny-llama", "tiny-chat", "tiny-vlm", "tiny-video/tokenizer"])
@pytest.mark.parametrize("backend", ["tokenizers", "auto"])
def test_prompts_of_the_sample_models_are_exact_too(folder, backend):
    tokenizer, source = load_tokenizer(f"models/{folder}", backend=backend), random.Random(folder)
    cache = PrefixCache(tokenizer.encode_plain, tokenizer.cut_pattern, 1 << 20, part_characters=8)
    for _ in range(100):
        text = "".join(source.choices([*PIECES, *WORDS.split(), WORDS], k=source.randrange(30)))
        assert cache.encode(text).tolist() == tokenizer.encode_plain(text)


@pytest.mark.parametrize("name", ALL)
def test_places_to_cut_at_are_found(name):
    text = "the quick<|im_start|> brown fox"
    pattern = cut_pattern(tokenizer_of(name))
    assert pattern is not None
    assert list(cuts(text, pattern, 1)) == ([3, 9, 27] if name in AT_WORDS else [9])


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("<x>", lstrip=True, special=True, normalized=False),
        AddedToken("<x>", rstrip=True, special=True, normalized=False),
        AddedToken("the", single_word=True, special=True, normalized=False),
    ],
)
def test_no_place_is_certain_beside_tokens_that_look_at_their_neighbors(added):
    assert cut_pattern(byte_bpe(GPT2, added=[added])) is None


def test_a_token_that_another_may_swallow_is_no_place_to_cut_at():
    added = [AddedToken(text, special=True, normalized=False) for text in ("<a>", "x<a", "<b>", "<c>", "x<c>y")]
    pattern = cut_pattern(byte_bpe(split(r"\s|."), added=added))
    assert pattern is not None and [found for found in ("<a>", "<b>", "<c>") if pattern.match(found)] == ["<b>"]


def test_a_vocabulary_with_tokens_of_several_words_is_cut_at_added_tokens_alone():
    pattern = cut_pattern(byte_bpe(split(r"\w+ \w+|\s|."), added=CHAT))
    assert pattern is not None and pattern.search("the fox") is None and pattern.search("the<|im_start|>")


def test_what_texts_begin_with_in_common_is_encoded_once():
    metrics, tokenizer = Registry("chat"), tokenizer_of("gpt2")
    cache = PrefixCache(plain(tokenizer), cut_pattern(tokenizer), 1 << 20, metrics, part_characters=100)
    common = "".join(f"{number} {WORDS}" for number in range(100))
    for question in ("first", "second"):
        cache.encode(f"{common}{question}")
    counts = {labels[1]: count for name, labels, count in metrics.take_delta().counters}
    num_tokens = len(plain(tokenizer)(common))
    assert 0.9 * num_tokens < counts["cache"] < num_tokens and counts["encoder"] < 1.2 * num_tokens


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), TEXTS), max_size=12))
def test_beginnings_that_are_kept_whole_change_no_tokens(asked):
    cache, encode = caching(tokenizer_of("gpt2")), plain(tokenizer_of("gpt2"))
    for number, length, end in asked:
        text = (WORDS * 2 + f"{number} " + WORDS * 2)[: 3 * length] + end
        assert cache.encode(text).tolist() == encode(text)


def test_what_many_texts_begin_with_is_kept_whole_within_the_bytes():
    cache = caching(tokenizer_of("gpt2"), max_bytes=40_000, part_characters=20)
    for number in range(30):
        for end in "abc":
            cache.encode(f"{number} {WORDS * 8}" + end)
        assert cache.num_bytes <= 40_000
    assert 0 < cache.num_run_bytes <= 10_000


def test_another_salt_finds_nothing():
    asked = []
    tokenizer = tokenizer_of("gpt2")
    cache = PrefixCache(lambda text: asked.append(text) or plain(tokenizer)(text), cut_pattern(tokenizer), 1 << 20)
    for salt in ("", "one", "one"):
        cache.encode("".join(f"{number} {WORDS}" for number in range(300)), salt)
    num_parts = len(asked) - 1  # the last text's end alone
    assert num_parts % 2 == 0 and asked[: num_parts // 2] == asked[num_parts // 2 : num_parts]


def test_the_parts_used_least_lately_go_when_the_bytes_are_used_up():
    cache = caching(tokenizer_of("gpt2"), max_bytes=20_000, part_characters=50)
    for number in range(100):
        cache.encode(f"{number} {WORDS * 5}")
        assert cache.num_bytes <= 20_000
    assert cache.num_bytes > 15_000


def test_threads_share_it():
    cache, text = caching(tokenizer_of("qwen"), max_bytes=3000, part_characters=20), WORDS * 50
    found, expected = [], plain(tokenizer_of("qwen"))(text)
    threads = [threading.Thread(target=lambda: found.append(cache.encode(text).tolist())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


async def test_a_long_chat_whose_beginning_is_known_waits_for_no_thread(sample_model):
    tokenizer = load_tokenizer(str(sample_model("llama")))
    encoder, go_on = PromptEncoder(tokenizer, Limits(max_concurrent_requests=1), cache_bytes=1 << 20), threading.Event()

    async def ids_of(text, end, salt=""):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": end}]
        ids, shown = await encoder.chat("prompt", messages, [], {}, None, salt, len(text))
        assert ids.tolist() == tokenizer.encode_chat(tokenizer.render_chat(messages)) and shown.count(end) == 1
        return ids

    for end in ("first", "second"):
        await ids_of(WORDS * 900, end)
    waiting = asyncio.ensure_future(encoder.run(go_on.wait, len(WORDS) * 900))
    await asyncio.sleep(0)  # the one place for long prompts is taken
    await ids_of(WORDS * 900, "third")
    for text, salt in (("other " + WORDS * 900, ""), (WORDS * 900, "another")):
        with pytest.raises(ResourceExhaustedError):
            await ids_of(text, "fourth", salt)
    go_on.set()
    await waiting
    encoder.close()


def test_special_tokens_stand_around_the_whole(sample_model):
    tokenizer = load_tokenizer(str(sample_model("llama")))
    encoder, text = PromptEncoder(tokenizer, Limits(), cache_bytes=1 << 20), WORDS * 500
    for _ in range(2):
        assert encoder.encode(text).tolist() == tokenizer.encode(text)
        assert encoder.encode(text, add_special_tokens=False).tolist() == tokenizer.encode_plain(text)
    encoder.close()
