"""Heads of GGUF files: read as the gguf package wrote them, and whatever else is in them refused by name."""

import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.errors import ConfigError
from bireme.gguf.head import TYPES, read_head
from tests.gguf.files import write

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.flag": True,
    "tokenizer.ggml.tokens": ["a", "bc", "é"],
    "tokenizer.ggml.scores": [0.0, -1.0, -2.5],
}


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    random = np.random.default_rng(0)
    tensors = {f"blk.{n}.weight": random.standard_normal((n + 2, 64)) for n in range(3)} | {"norm.weight": np.ones(7)}
    return write(tmp_path_factory.mktemp("gguf") / "valid.gguf", METADATA, tensors, gguf.GGMLQuantizationType.Q8_0)


def test_metadata_and_places_are_those_that_were_written(valid):
    head, reader = read_head(valid), gguf.GGUFReader(valid)
    assert head.architecture == "llama"
    assert head.integer("llama.block_count") == 2
    assert head.number("llama.rope.freq_base") == 10000.0
    assert head.flag("llama.flag") is True
    assert head.strings("tokenizer.ggml.tokens") == ["a", "bc", "é"]
    assert head.numbers("tokenizer.ggml.scores", 3) == [0.0, -1.0, -2.5]
    assert list(head.tensors) == [tensor.name for tensor in reader.tensors]
    for wanted in reader.tensors:
        found = head.tensors[wanted.name]
        assert (found.begin, found.num_bytes) == (wanted.data_offset, wanted.n_bytes)
        assert found.shape == tuple(reversed(wanted.shape.tolist()))
        assert found.type.name == wanted.tensor_type.name


def test_sizes_of_blocks_are_those_of_the_gguf_package():
    wanted = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] for kind in TYPES}
    assert {kind: (found.num_values, found.num_bytes) for kind, found in TYPES.items()} == wanted


@pytest.mark.parametrize("version", [2, 3])
def test_versions_two_and_three_are_read(valid, tmp_path, version):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + valid.read_bytes()[8:])
    assert len(read_head(path).tensors) == 4


def patched(data, found, instead):
    assert data.count(found) == 1
    return data.replace(found, instead)


def string(text):
    return struct.pack("<Q", len(text)) + text


def info(name, *numbers):
    return string(name) + struct.pack("<IQQIQ", *numbers)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: b"", "reaches to byte 4, the file has 0"),
        (lambda data: b"PK\3\4" + data[4:], "it is no GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1; versions 2 and 3"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "1152921504606846976 tensors in"),
        (lambda data: data[:16] + struct.pack("<Q", 1 << 40) + data[24:], "1099511627776 keys in"),
        (lambda data: data[:-64], "ends at .* the file at"),
        (lambda data: data[:300], "reaches to byte"),
        (lambda data: patched(data, string(b"llama.flag"), string(b"llama.flaw")[:-1] + b"\xff"), "not valid UTF-8"),
        (lambda data: patched(data, info(b"blk.0.weight", 2, 64, 2, 8, 0), info(b"blk.0.weight", 2, 64, 2, 18, 0)),
         "blk.0.weight: is IQ3_XXS, which is not read"),
        (lambda data: patched(data, info(b"blk.0.weight", 2, 64, 2, 8, 0), info(b"blk.0.weight", 2, 64, 2, 99, 0)),
         "type 99; there is no such type"),
        (lambda data: patched(data, info(b"blk.0.weight", 2, 64, 2, 8, 0), info(b"blk.0.weight", 2, 63, 2, 8, 0)),
         "multiple of 32"),
        (lambda data: patched(data, info(b"blk.0.weight", 2, 64, 2, 8, 0), info(b"blk.0.weight", 2, 64, 2, 8, 4)),
         "no multiple of the alignment"),
        (lambda data: patched(data, info(b"blk.0.weight", 2, 64, 2, 8, 0), info(b"blk.0.weight", 2, 64, 9, 8, 0)),
         "within another tensor"),
        (lambda data: patched(data, info(b"blk.0.weight", 2, 64, 2, 8, 0), info(b"blk.1.weight", 2, 64, 2, 8, 0)),
         "is there twice"),
        (lambda data: patched(data, string(b"llama.flag"), string(b"llama.flag")[:-4] + b"nnnn")
         .replace(b"llama.block_count", b"llama.vlock_count"), None),
    ],
)  # fmt: skip
def test_a_head_that_lies_is_refused_by_name(valid, tmp_path, change, text):
    path = tmp_path / "model.gguf"
    path.write_bytes(change(valid.read_bytes()))
    if text is None:  # unknown keys do no harm
        assert read_head(path).tensors
        return
    with pytest.raises(ConfigError, match=text) as raised:
        read_head(path)
    assert str(raised.value).startswith("model.gguf: ")


def test_a_value_of_another_kind_is_refused_with_its_key(valid):
    head = read_head(valid)
    for ask, text in (
        (lambda: head.integer("llama.flag"), "llama.flag: True; a whole number"),
        (lambda: head.text("llama.block_count"), "llama.block_count: 2; a text"),
        (lambda: head.integer("llama.block_count", highest=1), "0 to 1"),
        (lambda: head.numbers("tokenizer.ggml.scores", 4), "3 numbers, 4 are expected"),
        (lambda: head.integer("llama.context_length"), "llama.context_length is missing"),
    ):
        with pytest.raises(ConfigError, match=text):
            ask()


def in_parts(folder, counts=(0, 1, 2), told=3):
    for part in counts:
        metadata = {"split.count": told, "split.no": part, "split.tensors.count": 3}
        own = {"general.architecture": "llama"} | metadata
        write(folder / f"m-{part + 1:05d}-of-00003.gguf", own, {f"blk.{part}.weight": np.full((1, 4), part)})
    return folder / "m-00002-of-00003.gguf"


def test_parts_are_read_together_whichever_is_named(tmp_path):
    head = read_head(in_parts(tmp_path))
    assert [path.name for path in head.paths] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert {name: info.path.name[5:7] for name, info in head.tensors.items()} == {
        "blk.0.weight": "01", "blk.1.weight": "02", "blk.2.weight": "03",
    }  # fmt: skip


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    file = in_parts(tmp_path)
    (tmp_path / "m-00003-of-00003.gguf").rename(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match="m-00003-of-00003.gguf is missing beside"):
        read_head(file)
    with pytest.raises(ConfigError, match="part 2 .from 0. of 3"):
        read_head(tmp_path / "other.gguf")
    (tmp_path / "m-00003-of-00003.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="part 1 .from 0. of 3, its name and folder that it is 2 of 3"):
        read_head(file)


CHANGES = st.lists(
    st.tuples(st.integers(0, 1200), st.binary(min_size=1, max_size=9) | st.sampled_from([b"\xff" * 8, b"\0" * 8])),
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(changes=CHANGES, end=st.none() | st.integers(0, 2000))
def test_no_change_of_a_head_gives_anything_but_a_named_error_soon_and_in_little_memory(
    valid, tmp_path_factory, changes, end
):
    data = bytearray(valid.read_bytes())
    for at, instead in changes:
        data[at : at + len(instead)] = instead
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(data[:end])
    began = time.process_time()
    tracemalloc.start()
    try:
        head = read_head(path)
        assert sum(info.num_bytes for info in head.tensors.values()) <= path.stat().st_size
    except ConfigError as error:
        assert str(error).startswith("fuzzed.gguf: ") and str(error).isprintable() and len(str(error)) < 500
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - began < 1
    assert peak < 1 << 20
