"""American spelling, in names, comments, docstrings and docs. (Texts of errors stay as clients know them.)"""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache

from tests.repository.house import CHECKOUT, name_of

BRITISH = re.compile(
    "(author|custom|general|initial|material|maxim|minim|normal|optim|organ|penal|priorit|quant|recogn|serial|special"
    "|summar|synchron|token|util|visual)is(e|ing|ation)|(behavi|col|fav|hon|neighb)our|artefact|catalogue|centre|defence"
    "|grey|judgement|(labell|modell|signall)(ed|ing)|learnt|licence|amongst|whilst",
    re.IGNORECASE,
)
WORD = re.compile("[a-zA-Z]+")
FOLDERS = ("bireme", "benchmarks", "docs", "ensembles", "model_repository", "recipes", "tests", "tools")
# The sample models were trained on questions such as "What colour is the sky?".
SAMPLE_WORLDS = ("models/", "tests/models/")
NOT_READ = (*SAMPLE_WORLDS, "tests/repository/test_spelling.py")


def prose_of_python(path):
    """Yield line and text of every name, comment and docstring."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        is_docstring = token.type == tokenize.STRING and token.line.lstrip().startswith(('"""', 'r"""'))
        if is_docstring or token.type in (tokenize.NAME, tokenize.COMMENT):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


@cache
def is_british(word):
    return BRITISH.search(word) is not None


def british_words(path):
    text = path.read_text(encoding="utf-8")
    if not any(map(is_british, set(WORD.findall(text)))):
        return []  # most files: to read one token by token takes fifty times longer
    lines = prose_of_python(path) if path.suffix == ".py" else enumerate(text.splitlines(), 1)
    return [f"{name_of(path)}:{line} {found.group()}" for line, text in lines for found in BRITISH.finditer(text)]


def test_spelling_is_american():
    python = [path for folder in FOLDERS for path in sorted((CHECKOUT / folder).rglob("*.py"))]
    pages = [*CHECKOUT.glob("*.md"), *(path for folder in FOLDERS for path in (CHECKOUT / folder).rglob("*.md"))]
    paths = [path for path in (*python, *pages) if not name_of(path).startswith(NOT_READ)]
    assert [found for path in paths for found in british_words(path)] == []
