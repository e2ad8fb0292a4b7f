"""No answer under a guide breaks its schema: the JSON Schema Test Suite, and answers drawn at random."""

from __future__ import annotations

import json
import random

import pytest

from tests.logits.guided import suite
from tests.logits.guided.answers import Grammars

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return suite.fetch(tmp_path_factory.mktemp("suite"))


@pytest.mark.soak
def test_no_answer_is_one_that_the_suite_calls_invalid_and_the_page_says_what_is_accepted(folder):
    rows = suite.run(folder, Grammars())
    assert sum(row.wrong for row in rows.values()) == 0
    assert suite.shown_table() == suite.table(rows)


@pytest.mark.soak
def test_answers_drawn_at_random_satisfy_the_suite_s_schemas(folder):
    grammars, rng, num_drawn = Grammars(), random.Random(0), 0
    for name, case in suite.cases(folder):
        try:
            grammar = grammars.of(case["schema"])
        except ValueError:
            continue
        judge = jsonschema.Draft202012Validator(case["schema"])
        for text in filter(None, (grammars.answer(grammar, rng) for _ in range(8))):
            assert judge.is_valid(json.loads(text)), (name, case["description"], text)
            num_drawn += 1
    assert num_drawn > 1500
