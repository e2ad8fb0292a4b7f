import json

import pytest

from tools import make_sample_model
from tools.make_sample_model import STAMP, SampleModelError, make

SMALL = {"hidden": 32, "intermediate": 32, "layers": 2, "heads": 2, "vocab": 600, "head_dim": 16}


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setattr(make_sample_model, "CORPUS_BYTES", 50_000)


@pytest.mark.parametrize("arch", make_sample_model.ARCHITECTURES)
def test_a_model_is_complete_and_its_head_is_not_tied(arch, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make(tmp_path / "m", arch, **SMALL)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert not model.lm_head.weight.equal(model.get_input_embeddings().weight)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<s>")


def test_a_complete_model_is_left_alone_and_the_same_seed_makes_the_same_one(tmp_path):
    file = make(tmp_path / "m", **SMALL) / "model.safetensors"
    first, made_at = file.read_bytes(), file.stat().st_mtime_ns
    make(tmp_path / "m", **SMALL)
    assert file.stat().st_mtime_ns == made_at
    make(tmp_path / "m", force=True, **SMALL)
    assert file.stat().st_mtime_ns != made_at and file.read_bytes() == first


def test_another_shape_is_made_again(tmp_path):
    make(tmp_path / "m", **SMALL)
    make(tmp_path / "m", **SMALL | {"layers": 1})
    assert json.loads((tmp_path / "m" / STAMP).read_text())["layers"] == 1


def test_a_folder_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "weights.bin").write_text("precious")
    with pytest.raises(SampleModelError, match="not a sample model"):
        make(tmp_path, **SMALL)
    assert (tmp_path / "weights.bin").read_text() == "precious"


def test_nothing_is_left_when_making_fails(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make_sample_model, "_model", fail)
    with pytest.raises(SampleModelError, match="No space left on device; check free space"):
        make(tmp_path / "m", **SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"arch": "gpt"}, "one of llama"), ({"heads": 3}, "not a multiple of kv_heads"), ({"vocab": 10}, "at least 512")],
)
def test_impossible_shapes_are_refused(tmp_path, sizes, message):
    with pytest.raises(SampleModelError, match=message):
        make(tmp_path / "m", **SMALL | sizes)
