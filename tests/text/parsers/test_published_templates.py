"""Calls that published templates write: the table of docs/parsers.md, made by tools/make_parser_table.py."""

from __future__ import annotations

import pytest

from bireme.text.parsers import TOOLS
from tests.text.parsers import answers
from tools import make_parser_table, real_model

SKIPPED = ("llama4_json", "harmony")  # our own templates of these take one call's form alone, as do the published ones


def told():
    """Return the rows of the page's table, without its head."""
    made = make_parser_table.PAGE.read_text(encoding="utf-8").split(make_parser_table.BEGIN)[1]
    lines = made.split(make_parser_table.END)[0].splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


def test_the_table_has_each_template_that_is_tried_with_its_parsers_and_tells_no_divergence():
    total, untold = len(make_parser_table.HARD_ARGUMENTS), make_parser_table.UNTOLD
    assert [tuple(row[:3]) for row in told()] == [
        (template, *parsers) for template, parsers in make_parser_table.PARSERS.items()
    ]
    read = {row[0]: row[3] for row in told()}
    assert read == {name: f"{total - len(untold.get(name, ()))} of {total}" for name in make_parser_table.PARSERS}
    assert all(int(row[4].replace(",", "")) > 1000 for row in told())


@pytest.mark.parametrize("name", TOOLS)
def test_hard_arguments_are_read_back_from_our_own_templates_too(name):
    def write(arguments):
        return "", answers.render_calls(name, [(make_parser_table.NAME, arguments)])

    assert make_parser_table.read_row("own", name, "", write, step=16).faults == []


def test_a_reading_that_differs_is_counted_and_told():
    row = make_parser_table.read_row("own", "hermes", "", lambda arguments: ("", "no call"))
    assert row.num_read == 0 and "20 divergences" in make_parser_table.table([row])


@pytest.mark.soak
def test_the_table_is_what_the_published_templates_make():
    try:
        folder = real_model.chat_templates()
    except real_model.NotFetchedError as error:
        pytest.skip(str(error))
    found = list(make_parser_table.rows(folder))
    assert [fault for row in found for fault in row.faults] == []
    page = make_parser_table.PAGE.read_text(encoding="utf-8")
    assert make_parser_table.page_with(make_parser_table.table(found)) == page, "run tools/make_parser_table.py"
