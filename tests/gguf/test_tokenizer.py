"""Tokenizers of GGUF files: equal to what transformers makes of the same file, in a folder that is made once."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing

import numpy as np
import pytest

from bireme.errors import ConfigError
from bireme.gguf.folder import model_folder
from bireme.text.encoder import PROBES
from bireme.text.tokenizer import load_tokenizer
from tests.gguf.models import byte_tokenizer
from tests.gguf.test_architectures import HIDDEN, llama

TEXTS = (
    *PROBES,
    "<s>system\nhello</s> world ",
    " leading and trailing ",
    "a\n\n\nb  c   d",
    "the and her tea nil",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bireme" / "gguf"


def sentence_pieces():
    words = [
        "▁the",
        "▁and",
        "he",
        "th",
        "er",
        "▁t",
        "▁a",
        "nd",
        "an",
        "in",
        "▁h",
        "ll",
        "ell",
        "▁hello",
        "▁w",
        "or",
        "ld",
    ]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def model_file(folder, texts, architecture="llama", name="m.gguf"):
    size = len(texts["tokenizer.ggml.tokens"]) + 5  # the model's vocabulary is padded
    embedding = {"token_embd.weight": np.ones((size, HIDDEN))}
    return llama(folder, texts, embedding, architecture).paths[0].rename(folder / name)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2"])
def test_byte_level_texts_are_cut_as_by_transformers(tmp_path, pre):
    from transformers import AutoTokenizer

    file = model_file(tmp_path, byte_tokenizer(512) | {"tokenizer.ggml.pre": pre})
    own = load_tokenizer(str(model_folder(file)), backend="tokenizers")
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        assert own.encode(text) == reference(text)["input_ids"], text
        assert own.decode(own.encode(text), False) == reference.decode(reference(text)["input_ids"]), text


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_sentence_pieces_are_joined_as_by_transformers(tmp_path, architecture):
    from transformers import AutoTokenizer

    file = model_file(tmp_path, sentence_pieces(), architecture)
    own = load_tokenizer(str(model_folder(file)), backend="tokenizers")
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        assert own.encode(text) == reference(text)["input_ids"], text


def test_digits_of_smollm_stand_alone_and_leave_the_space_before_them(tmp_path):
    texts = byte_tokenizer(512) | {"tokenizer.ggml.pre": "smollm"}
    own = load_tokenizer(str(model_folder(model_file(tmp_path, texts))))
    assert [own.decode([token]) for token in own.encode("a 12")] == ["a", " ", "1", "2"]


def test_the_folder_says_template_special_tokens_and_ends(tmp_path):
    texts = byte_tokenizer(512) | {
        "tokenizer.ggml.tokens": [*byte_tokenizer(512)["tokenizer.ggml.tokens"][:-1], "<|im_end|>"],
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.chat_template.../../x": "outside",
    }  # fmt: skip
    texts["tokenizer.ggml.merges"] = texts["tokenizer.ggml.merges"][:-1]
    texts["tokenizer.ggml.token_type"] = [*texts["tokenizer.ggml.token_type"][:-1], 3]
    folder = model_folder(model_file(tmp_path, texts))
    own = load_tokenizer(str(folder))
    assert own.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    prompt = own.render_chat([{"role": "user", "content": "hi <s>"}])
    assert own.encode_chat(prompt) == [1, *own.encode_plain("hi "), *map(own.token_id, "<s>"), 2]
    last = len(texts["tokenizer.ggml.tokens"]) - 1
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2, last]}
    assert [path.name for path in (folder / "additional_chat_templates").iterdir()] == ["tool_use.jinja"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"tokenizer.ggml.pre": "poro-chat"}, "tokenizer.ggml.pre: 'poro-chat' is not read .read are .*qwen2"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model: t5; gpt2 and llama are read"),
        ({"tokenizer.ggml.merges": ["a"]}, "'a' is none of two of its tokens"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id: 999; 0 to"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type: 1 numbers"),
        ({"tokenizer.ggml.tokens": ["x" * 2000]}, "one has 2000 characters"),
    ],
)
def test_a_tokenizer_that_can_not_be_read_is_refused_by_name(tmp_path, cache, more, text):
    file = model_file(tmp_path, byte_tokenizer(512) | more)
    with pytest.raises(ConfigError, match=text):
        model_folder(file)
    assert list(cache.iterdir()) == []


def test_processes_that_start_at_once_make_one_folder(tmp_path, cache):
    file = model_file(tmp_path, byte_tokenizer(512))
    with concurrent.futures.ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        assert len(set(pool.map(model_folder, [file] * 8))) == 1
    assert [path.name for path in cache.iterdir()] == [model_folder(file).name]
    assert (model_folder(file) / file.name).resolve() == file.resolve()


def test_a_file_that_has_changed_has_another_folder(tmp_path):
    texts = byte_tokenizer(512)
    first = model_folder(model_file(tmp_path, texts))
    second = model_folder(model_file(tmp_path, texts | {"tokenizer.chat_template": "other"}))
    assert first != second
    assert (second / "chat_template.jinja").read_text() == "other"


def test_a_cache_that_can_not_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    with pytest.raises(ConfigError, match="m.gguf: its model folder can't be made.*set XDG_CACHE_HOME"):
        model_folder(model_file(tmp_path, byte_tokenizer(512)))
