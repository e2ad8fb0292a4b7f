"""YAML by libyaml is what PyYAML's own reader makes of it, and an error is told as that one tells it."""

import io
import os

import pytest
import yaml

from bireme import yaml_text


@pytest.mark.parametrize(
    "text", ["", "a: [1, 2.5, yes, ~]\nb: {c: 2024-01-31}", "a: &x [1]\nb: *x", "%YAML 1.1\n--- é😀"]
)
def test_a_document_is_read_as_by_pyyaml(text):
    assert yaml_text.read(text) == yaml.safe_load(text)
    assert yaml.safe_load(yaml_text.write(yaml_text.read(text))) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text", ["a: [1,\n", "a: b: c", 'a: "x', "a: *y", "a: \0", "a: 2024-13-45", "[" * 1000, "a: 1\n---\n"]
)
def test_what_is_refused_is_told_as_by_pyyaml(text):
    with pytest.raises((yaml.YAMLError, ValueError, RecursionError)) as expected:
        yaml.safe_load(text)
    with pytest.raises(type(expected.value)) as found:
        yaml_text.read(text)
    assert found.value is not expected.value
    assert isinstance(found.value, RecursionError) or str(found.value) == str(expected.value)


def test_an_error_in_a_file_names_it_and_its_line():
    stream = io.StringIO("a: 1\nb: [\n")
    stream.name = "recipe.yaml"
    with pytest.raises(yaml.YAMLError, match=r'(?s)expected the node content.*in "recipe.yaml", line 3'):
        yaml_text.compose(stream)


def test_nodes_know_their_lines():
    root = yaml_text.compose(io.StringIO("a: 1\nb:\n  c: 2\n"))
    (_, inner) = root.value[1]
    assert inner.value[0][0].start_mark.line == 2


def test_bytes_that_are_no_utf_8_are_written_as_escapes_that_are_read_back():
    tree = {"PATH": os.fsdecode(b"/opt/caf\xe9/bin"), "note": "é"}
    assert "\\uDCE9" in (text := yaml_text.write(tree)) and yaml_text.read(text)["note"] == "é"
