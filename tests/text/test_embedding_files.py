import json

import pytest

from bireme.errors import ConfigError, RequestError
from bireme.text.embedding_files import max_seq_length_of, read_texts


@pytest.fixture
def folder(tmp_path):
    def write(name, tree):
        (tmp_path / name).write_text(json.dumps(tree))
        return tmp_path

    return write


def test_the_default_prompt_comes_before_texts_that_name_none(folder):
    prompts = {"query": "q: ", "document": "d: "}
    texts = read_texts(
        folder("config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    )
    assert [texts.whole("x", name) for name in (None, "document", "")] == ["q: x", "d: x", "x"]
    with pytest.raises(RequestError, match="prompt_name: task; prompts of this model: query, document"):
        texts.whole("x", "task")


def test_texts_of_an_uncased_model_lose_their_case(folder):
    assert read_texts(folder("sentence_bert_config.json", {"do_lower_case": True})).whole("Ab") == "ab"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prompts": {"query": 3}}, "prompts: names with texts"),
        ({"default_prompt_name": "query"}, "default_prompt_name: query; not among prompts"),
        ({"similarity_fn_name": "angle"}, "similarity_fn_name: angle; one of cosine"),
    ],
)
def test_files_that_make_no_sense_are_refused_by_key(folder, config, message):
    with pytest.raises(ConfigError, match=message):
        read_texts(folder("config_sentence_transformers.json", config))


def test_the_longest_text_is_the_model_s_or_else_the_tokenizer_s(folder):
    path = folder("tokenizer_config.json", {"model_max_length": 512})
    assert max_seq_length_of(path) == 512
    assert max_seq_length_of(folder("sentence_bert_config.json", {"max_seq_length": 256})) == 256


def test_a_tokenizer_without_an_end_sets_no_limit(folder):
    assert max_seq_length_of(folder("tokenizer_config.json", {"model_max_length": 10**30})) is None
