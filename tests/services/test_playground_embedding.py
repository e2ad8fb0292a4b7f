"""Embeddings on the page: a map of texts and the neighbors of each."""

import itertools
import json
import urllib.request

import numpy as np
import pytest

from tests.services.test_playground_access import violations

TEXTS = [
    "The ship crosses the sea.", "A vessel sails over the ocean.", "The dog naps on the hay.", "A loaf tastes of salt."
]  # fmt: skip


@pytest.fixture
def page(scripted, visit):
    page = visit(scripted.url).open()
    choose(page, "vectors")
    return page


def choose(page, name):
    """Letters that were typed within a second are one name to a browser."""
    script = "const list = document.getElementById('model'); list.value = arguments[0];"
    page.run(script + "list.dispatchEvent(new Event('change'))", name)


def embed(page, *texts):
    page.set("embedding-texts", "\n".join(texts))
    page.click("#embedding-make")
    page.until(lambda: page.text("#embedding-status").startswith(f"{len(texts)} texts"))


def neighbors(page):
    return [item.text.split("\n")[0] for item in page.all("#embedding-neighbors li")]


def test_a_model_that_makes_embeddings_has_a_view_of_its_own(page):
    assert page.find("#embedding").is_displayed() and not page.find("#composer").is_displayed()
    choose(page, "scripted")
    assert page.find("#composer").is_displayed() and not page.find("#embedding").is_displayed()


def served(url, texts):
    data = json.dumps({"model": "vectors", "input": texts}).encode()
    request = urllib.request.Request(f"{url}v1/embeddings", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return np.array([one["embedding"] for one in json.load(reply)["data"]])


def test_neighbors_of_a_text_are_those_with_the_largest_cosines(page):
    embed(page, *TEXTS)
    rows = served(page.url, TEXTS)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    for chosen in (0, 2):
        page.all(".point circle")[chosen].click()
        assert page.find("#embedding-chosen").get_property("value") == TEXTS[chosen]
        expected = [at for at in np.argsort(-(rows @ rows[chosen])) if at != chosen]
        assert neighbors(page) == [TEXTS[at] for at in expected]
    assert len(page.all(".point.chosen")) == 1 and violations(page) == []


def test_points_lie_as_the_two_strongest_components_say(page):
    vectors = np.random.default_rng(3).normal(size=(12, 40))
    found = np.array(page.run_module(f"const m = await load('projection.js'); return m.project({vectors.tolist()})"))
    centered = vectors - vectors.mean(0)
    left, strengths, _ = np.linalg.svd(centered, full_matrices=False)
    expected = left[:, :2] * strengths[:2]
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-6)


CLUMPS = ["The ship crosses the sea.", "They say that the vessel sails over the ocean.", "The captain drops it."] * 4


@pytest.mark.parametrize("width", [280, 560])
def test_labels_of_near_texts_lie_beside_each_other_within_the_map(page, width):
    places = [[width / 2 + 3 * (at % 3), 100 + 150 * (at % 2) + at] for at in range(len(CLUMPS))]
    code = f"return (await load('labels.js')).placedLabels({places}, {CLUMPS}, {width}, 360)"
    labels = [label for label in page.run_module(code) if label]
    share = {"start": 0, "middle": 0.5, "end": 1}
    lefts = [one["x"] - share[one["anchor"]] * 6 * len(one["text"]) for one in labels]
    boxes = [(x, one["y"], x + 6 * len(one["text"]), one["y"] + 14) for x, one in zip(lefts, labels, strict=True)]
    assert len(labels) > 8 and all(0 < left and right < width for left, _, right, _ in boxes)
    pairs = itertools.combinations(boxes, 2)
    assert [pair for pair in pairs if overlap(*pair)] == []


def overlap(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def test_one_text_and_too_many_are_refused_before_they_are_sent(page):
    for count in (1, 101):
        page.set("embedding-texts", "\n".join(f"text {at}" for at in range(count)))
        page.click("#embedding-make")
        assert page.text("#embedding-status") == f"Enter 2 to 100 texts, one a line; there are {count}."


def test_texts_that_are_all_alike_are_one_point(page):
    embed(page, "same", "same", "same")
    assert neighbors(page) == ["same", "same"] and page.text(".cosine") == "1.00"
