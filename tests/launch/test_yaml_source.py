"""Where keys stand in YAML files."""

from __future__ import annotations

import pytest
import yaml

from bireme.launch.yaml_source import Place, read_source


@pytest.fixture
def read(tmp_path):
    def read(text, name="a.yaml"):
        (tmp_path / name).write_text(text)
        return read_source(tmp_path / name)

    return read


def test_every_key_has_its_line(read):
    source = read("# a comment\na: 1\nb:\n  c: {d: 2}\n\n  e: [3]\n")
    lines = {".".join(keys): place.line for keys, place in source.places.items()}
    assert lines == {"a": 2, "b": 3, "b.c": 4, "b.c.d": 4, "b.e": 6}


def test_a_missing_key_is_found_at_its_block(read):
    source = read("a:\n  b:\n    c: 1\n")
    assert source.find(("a", "b", "missing", "deeper")).line == 2
    assert source.find(("missing",)) == Place(source.file, 1)


def test_a_key_written_twice_is_told_with_both_places(read):
    (found,) = read("a: 1\nb: 2\na: 3\n").repeated
    assert (found.keys, found.first.line, found.second.line) == (("a",), 1, 3)


def test_an_included_file_s_keys_keep_their_own_file(read):
    outer, inner = read("a: b.yaml\n"), read("x: 1\ny: 2\n", "b.yaml")
    outer.include(("a",), inner)
    assert outer.find(("a", "y")) == Place(inner.file, 2) and outer.find(("a",)).file == outer.file


@pytest.mark.parametrize("text", ["", "# nothing\n", "- 1\n- {a: 2}\n", "7\n"])
def test_a_file_without_keys_has_no_places(read, text):
    assert read(text).places == {}


def test_an_error_names_the_file_and_its_line(read, tmp_path):
    with pytest.raises(yaml.MarkedYAMLError) as caught:
        read("a: 1\nb: [\n")
    assert str(tmp_path) in str(caught.value) and caught.value.problem_mark.line == 2
