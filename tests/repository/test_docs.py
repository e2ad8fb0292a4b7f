"""What the pages say of the checkout: paths that exist, an alphabetical glossary."""

from __future__ import annotations

import ast
import json
import re

import pytest

from bireme.text.tokenizer import load_tokenizer
from tests.repository.house import CHECKOUT, PACKAGE, functions_of, tree_of
from tests.repository.test_imports import ROWS
from tools import make_api_page, make_metrics_page, make_models_page

PAGES = ("CONTRIBUTING.md", "README.md", "docs/architecture.md", "docs/engine_process.md", "docs/glossary.md")
TOP = ("benchmarks", "bireme", "docs", "ensembles", "model_repository", "recipes", "tests", "tools")


def text_of(page):
    path = CHECKOUT / page
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_page_names_exist(page):
    quoted = re.findall(rf"`((?:{'|'.join(TOP)})/[\w./-]*)`", text_of(page))
    assert [path for path in quoted if not (CHECKOUT / path).exists()] == []


def test_links_between_pages_lead_somewhere():
    pages = [*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([\w./-]+)\)", page.read_text())]
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_the_glossary_is_in_alphabetical_order():
    terms = [line.split("|")[1].strip().lower() for line in text_of("docs/glossary.md").splitlines() if "|" in line]
    assert terms[2:] == sorted(terms[2:])


def test_a_newcomers_first_prompt_is_one_that_the_sample_knows():
    prompt, again = re.findall(r'"(<\|im_start\|>.*?)"', text_of("README.md"))
    question = {"role": "user", "content": "What is 12 + 30?"}
    rendered = load_tokenizer("models/tiny-chat").render_chat([question], None, {}).text
    assert json.loads(f'"{prompt}"') == json.loads(f'"{again}"') == rendered


def test_the_page_of_metrics_is_what_their_table_makes():
    assert make_metrics_page.text() == text_of("docs/metrics.md"), "run tools/make_metrics_page.py"


def test_the_page_of_endpoints_and_fields_is_what_their_structs_make():
    assert make_api_page.text() == text_of("docs/api.md"), "run tools/make_api_page.py"


def test_the_page_of_models_is_what_the_engine_s_tables_make():
    assert make_models_page.text() == text_of("docs/models.md"), "run tools/make_models_page.py"


def test_a_model_class_without_a_case_that_proves_it_is_refused(monkeypatch):
    monkeypatch.setattr(make_models_page, "PROVED", make_models_page.PROVED | {"FalconForCausalLM"})
    with pytest.raises(ValueError, match="no case for FalconForCausalLM"):
        make_models_page.text()


def test_a_metric_that_no_part_of_its_page_takes_is_refused(monkeypatch):
    monkeypatch.delitem(make_metrics_page.PARTS, "Requests and tokens")
    with pytest.raises(ValueError, match="bireme_requests_total"):
        make_metrics_page.text()


def test_the_architecture_shows_every_part_in_the_order_of_imports():
    shown = re.search(r"direction of imports\n\n```\n(.*?)```", text_of("docs/architecture.md"), re.DOTALL).group(1)
    assert {name for row in ROWS for name in row} == set(re.findall(r"[a-z_]+", shown)) - {"model", "py", "tools"}


def names_in(path):
    """Return a module's classes and functions, methods as Class.method."""
    classes = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    methods = {f"{one.name}.{node.name}" for one in classes for node in one.body if hasattr(node, "name")}
    return methods | {node.name for node in (*classes, *functions_of(path))}


def test_what_is_said_to_be_decided_somewhere_has_its_function_there():
    section = text_of("docs/architecture.md").partition("## Where is it decided?\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .*\? \| (.*) \|$", section, re.MULTILINE)
    named = [quoted.partition(":")[::2] for row in rows for quoted in re.findall(r"`([^`]+)`", row)]
    assert [file for file, _ in named if not (PACKAGE / file).is_file()] == []
    assert [f"{file}:{name}" for file, name in named if name and name not in names_in(PACKAGE / file)] == []
    assert len(rows) >= 20 and all(".py:" in row for row in rows)
