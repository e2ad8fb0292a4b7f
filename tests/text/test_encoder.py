"""Both encoders say the same, or the quick one is not used."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.errors import ConfigError, RequestError
from bireme.text import encoder as encoders
from bireme.text.encoder import create_encoder
from bireme.text.tokenizer import load_tokenizer, recipe_tokenizer

fastokens = pytest.importorskip("fastokens")
CORPUS = ["the quick brown fox jumps over the lazy dog", "don't, won't; can't! 2024-11-22", "naïve café — 東京 🙂"] * 20
SPLIT = (  # Llama 3's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED = [
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("<x y>", lstrip=True, rstrip=True),
    AddedToken("café", normalized=True),
    AddedToken("wör", single_word=True),
]
PIECES = [*ADDED, "<|begin|>", "the ", "don't", "12345", "  \n", "东", "e\u0301", "🙂👩\u200d👧", "\u00a0", "<|", "▁"]
TEXTS = st.text(max_size=40) | st.lists(st.sampled_from([str(getattr(p, "content", p)) for p in PIECES])).map("".join)


def byte_level(normalizer=None, **model):
    """As Llama 3 and Qwen: a regular expression, bytes, BPE."""
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(ADDED)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(special_tokens=["[UNK]"], show_progress=False))
    return tokenizer


TOKENIZERS = {
    "llama3": byte_level(ignore_merges=True),
    "qwen": byte_level(normalizers.NFC()),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Both encoders of each tokenizer."""
    made = []
    for name, tokenizer in TOKENIZERS.items():
        file = tmp_path_factory.mktemp(name) / "tokenizer.json"
        tokenizer.save(str(file))
        made.append((create_encoder(tokenizer, file, "fastokens"), create_encoder(tokenizer, file, "tokenizers")))
    return made


@settings(deadline=None, max_examples=500)
@given(text=TEXTS, add_special_tokens=st.booleans())
def test_both_give_the_same_ids(pairs, text, add_special_tokens):
    for fast, reference in pairs:
        assert fast.name == "fastokens" and reference.name == "tokenizers"
        assert fast.encode(text, add_special_tokens) == reference.encode(text, add_special_tokens)


def test_the_quick_one_is_taken_where_it_fits(sample_model):
    file = sample_model("llama") / "tokenizer.json"
    assert create_encoder(Tokenizer.from_file(str(file)), file).name == "fastokens"


@pytest.mark.parametrize(("backend", "name"), [("auto", "fastokens"), ("tokenizers", "tokenizers")])
def test_a_recipe_chooses_what_encodes(sample_model, backend, name):
    workers = {"decode": {"engine": "mocker"}}
    tree = {"model": str(sample_model("llama")), "workers": workers, "name": "test", "tokenizer_backend": backend}
    assert recipe_tokenizer(convert(tree, Recipe, "test"))._encoder.name == name


def test_what_the_quick_one_can_not_read_is_left_to_the_library(tmp_path, caplog):
    tokenizer, file = word_piece(), tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    with caplog.at_level(logging.DEBUG, "bireme.text"):
        assert create_encoder(tokenizer, file).name == "tokenizers"
    assert "BertPreTokenizer" in caplog.text
    with pytest.raises(ConfigError, match=r"tokenizer_backend: .*BertPreTokenizer.*set auto or tokenizers"):
        create_encoder(tokenizer, file, "fastokens")


def test_a_quick_one_that_says_something_else_is_not_taken(tmp_path):
    """The two are given different files: the comparison must see it."""
    file = tmp_path / "tokenizer.json"
    TOKENIZERS["llama3"].save(str(file))
    tree = json.loads(file.read_text())
    tree["model"]["merges"] = tree["model"]["merges"][:-40]
    file.write_text(json.dumps(tree))
    assert create_encoder(TOKENIZERS["llama3"], file).name == "tokenizers"
    with pytest.raises(ConfigError, match="differently"):
        create_encoder(TOKENIZERS["llama3"], file, "fastokens")


def test_without_fastokens_the_library_encodes(sample_model, monkeypatch):
    def gone(name):
        raise ImportError(name)

    monkeypatch.setattr(encoders.importlib, "import_module", gone)
    folder = sample_model("llama")
    assert load_tokenizer(str(folder)).encode("hello") == load_tokenizer(str(folder), backend="tokenizers").encode(
        "hello"
    )
    with pytest.raises(ConfigError, match="pip install fastokens"):
        load_tokenizer(str(folder), backend="fastokens")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    tokenizer, file = byte_level(), tmp_path / "tokenizer.json"
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(file))
    fast = load_tokenizer(str(tmp_path), backend="fastokens")
    assert fast.encode("the quick brown fox jumps") == load_tokenizer(str(tmp_path), backend="tokenizers").encode(
        "the quick brown fox jumps"
    )
    assert len(fast.encode("the quick brown fox jumps over it")) > 5


@pytest.mark.parametrize("backend", ["fastokens", "tokenizers"])
def test_a_lone_surrogate_is_refused(sample_model, backend):
    with pytest.raises(RequestError, match="lone surrogate"):
        load_tokenizer(str(sample_model("llama")), backend=backend).encode("a\ud800b")


def test_what_the_quick_one_gives_up_on_is_encoded_all_the_same(sample_model):
    class Limited:
        def encode(self, text, add_special_tokens):
            raise ValueError("match limit exceeded")

    file = sample_model("llama") / "tokenizer.json"
    reference = create_encoder(Tokenizer.from_file(str(file)), file, "tokenizers")
    assert encoders.FastEncoder(Limited(), reference).encode("hello", True) == reference.encode("hello", True)
