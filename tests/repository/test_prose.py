"""How much docstrings say, and how long a sentence of docstrings and pages is."""

from __future__ import annotations

import ast
import re

import pytest

from tests.repository.house import CHECKOUT, MODULES, PACKAGE, name_of, nodes_of

MAX_SENTENCE_WORDS = 40
# Words of docstrings per 1,000 lines: what a caller must know, and no more.
MAX_DOCSTRING_WORDS = {"discovery": 910, "workers": 770, "launch": 720, "logits": 770}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
LIST_MARK = re.compile(r"^\s*([*-]|\d+\.)\s")


def docstrings_of(path):
    """Yield who says it, and what."""
    for node in nodes_of(path):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield f"{name_of(path)}:{getattr(node, 'name', '1')}", text


def prose_of_docstring(text):
    """Less examples and tables."""
    return "\n".join(
        LIST_MARK.sub("\n\n", line) for line in text.split("\n") if not line.startswith(("  ", "|", "├", "└"))
    )


def prose_of_page(text):
    text = re.sub(r"^\s*```.*?^\s*```", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    lines = (
        "" if line.lstrip().startswith(("|", "#", "<!--")) or line.startswith("    ") else line
        for line in text.split("\n")
    )
    return "\n".join(LIST_MARK.sub("\n\n", line) for line in lines)


def sentences_of(prose):
    """Yield the sentences; what is quoted as code, and where a link leads, count as a word each."""
    for paragraph in re.split(r"\n\s*\n", prose):
        plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", paragraph))
        yield from (" ".join(part.split()) for part in re.split(r"(?<=[.!?])[)\"*]*\s+", plain))


def long_sentences(prose):
    found = ((len(re.findall(r"\S*\w\S*", sentence)), sentence) for sentence in sentences_of(prose))
    return [f"{count} words: {sentence}" for count, sentence in found if count > MAX_SENTENCE_WORDS]


@pytest.mark.parametrize("folder", MAX_DOCSTRING_WORDS)
def test_docstrings_say_what_a_caller_must_know_and_stop(folder):
    paths = [path for path in MODULES if PACKAGE / folder in path.parents]
    num_words = sum(len(re.findall(r"[A-Za-z']+", text)) for path in paths for _, text in docstrings_of(path))
    num_lines = sum(path.read_text().count("\n") for path in paths)
    assert 1000 * num_words / num_lines <= MAX_DOCSTRING_WORDS[folder]


def test_no_docstring_has_a_sentence_that_is_too_long():
    found = [
        f"{name}: {sentence}"
        for path in MODULES
        for name, text in docstrings_of(path)
        for sentence in long_sentences(prose_of_docstring(text))
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_sentence_that_is_too_long(page):
    assert long_sentences(prose_of_page(page.read_text())) == []


def test_a_sentence_that_is_too_long_is_seen():
    words = "word " * 40
    assert long_sentences(f"{words}\n\nend. `{words}` [link](to somewhere).") == []
    assert len(long_sentences(f"* {words}\nand one more.")) == 1
