import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from bireme.text import vocabulary
from bireme.text.detokenizer import TableDetokenizer, WindowDetokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "don't, won't; can't!", "naïve café — 東京 🙂"] * 20
TEXTS = st.text(max_size=60) | st.lists(st.sampled_from([*"ab é東🙂👩‍👩‍👧\ufffd\u200d\n", "  ", "don't"])).map("".join)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|end|>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>", "日本"])
    return tokenizer


def sentence_piece():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials[:2], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocab = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in specials if token not in vocab])
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


BYTE_LEVEL, SENTENCE_PIECE, WORD_PIECE = byte_level(), sentence_piece(), word_piece()
BYTE_TOKENS = [SENTENCE_PIECE.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]


def cut(tokens, sizes):
    """Cut tokens into pieces of these sizes, one each when the sizes run out."""
    pieces, at = [], 0
    while at < len(tokens):
        size = sizes.pop() if sizes else 1
        pieces.append(tokens[at : at + size])
        at += size
    return pieces


def joined(detokenizer, pieces):
    return "".join([*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()])


def table(tokenizer):
    built = vocabulary.build(tokenizer)
    assert built is not None
    return TableDetokenizer(built)


SIZES = st.lists(st.integers(1, 7), max_size=20)


@settings(deadline=None, max_examples=300)
@given(TEXTS, SIZES)
def test_any_text_comes_back_however_it_is_cut(text, sizes):
    tokens = BYTE_LEVEL.encode(text).ids
    assert joined(table(BYTE_LEVEL), cut(tokens, sizes)) == text


@settings(deadline=None, max_examples=500)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=60), SIZES)
def test_random_tokens_give_what_decoding_them_at_once_gives(tokens, sizes):
    known = [token for token in tokens if BYTE_LEVEL.id_to_token(token) is not None]
    whole = BYTE_LEVEL.decode(known, skip_special_tokens=False)
    assert joined(table(BYTE_LEVEL), cut(tokens, sizes)) == whole


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=40), SIZES)
def test_bytes_that_are_not_utf8_become_replacement_characters_as_in_the_library(data, sizes):
    alphabet = vocabulary.byte_characters()
    token_of = {byte: BYTE_LEVEL.token_to_id(character) for character, byte in alphabet.items()}
    tokens = [token_of[byte] for byte in data]
    text = joined(table(BYTE_LEVEL), cut(tokens, sizes))
    assert text == BYTE_LEVEL.decode(tokens, skip_special_tokens=False) == data.decode(errors="replace")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40), SIZES)
def test_what_is_held_back_depends_on_the_tokens_alone(tokens, sizes):
    one_by_one, in_pieces = table(BYTE_LEVEL), table(BYTE_LEVEL)
    first = "".join(one_by_one.push([token]) for token in tokens)
    second = "".join(in_pieces.push(piece) for piece in cut(tokens, sizes))
    assert first == second
    assert len(one_by_one.flush()) <= 3


@settings(deadline=None, max_examples=300)
@given(TEXTS, SIZES)
def test_sentence_piece_text_goes_on_after_a_prompt_with_its_first_space(text, sizes):
    tokens = SENTENCE_PIECE.encode(text).ids
    prompt = SENTENCE_PIECE.encode("the").ids
    whole = SENTENCE_PIECE.decode(prompt + tokens, skip_special_tokens=False)
    assert joined(table(SENTENCE_PIECE), cut(tokens, sizes)) == whole.removeprefix("the")


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=20), st.binary(max_size=6))
def test_byte_tokens_keep_their_valid_characters_beside_invalid_bytes(text, tail):
    data = text.encode() + tail
    tokens = [BYTE_TOKENS[byte] for byte in data]
    assert joined(table(SENTENCE_PIECE), [[token] for token in tokens]) == data.decode(errors="replace")


def test_special_tokens_have_no_text_when_they_are_skipped():
    end = BYTE_LEVEL.token_to_id("<|end|>")
    built = vocabulary.build(BYTE_LEVEL).without(frozenset({end}))
    tokens = [*BYTE_LEVEL.encode("a").ids, end]
    assert joined(TableDetokenizer(built), [tokens]) == "a"
    assert joined(table(BYTE_LEVEL), [tokens]) == "a<|end|>"


def test_a_decoder_that_looks_at_neighbors_has_no_table():
    assert vocabulary.build(WORD_PIECE) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_window_gives_what_decoding_all_tokens_at_once_gives(seed):
    dice = random.Random(seed)
    tokens = [dice.randrange(WORD_PIECE.get_vocab_size()) for _ in range(50)]
    detokenizer = WindowDetokenizer(WORD_PIECE, skip_special_tokens=True)
    sizes = [dice.randrange(1, 5) for _ in range(30)]
    assert joined(detokenizer, cut(tokens, sizes)) == WORD_PIECE.decode(tokens)


@settings(deadline=None, max_examples=200)
@given(TEXTS, SIZES)
def test_a_window_never_splits_a_character(text, sizes):
    tokens = BYTE_LEVEL.encode(text).ids
    detokenizer = WindowDetokenizer(BYTE_LEVEL, skip_special_tokens=True)
    assert joined(detokenizer, cut(tokens, sizes)) == text


def test_a_window_does_not_wait_for_ever_for_invalid_bytes():
    tokens = [BYTE_LEVEL.token_to_id("Ģ")] * 20  # byte 0x80, never the beginning of a character
    detokenizer = WindowDetokenizer(BYTE_LEVEL, skip_special_tokens=True)
    assert len("".join(detokenizer.push([token]) for token in tokens)) >= 16
