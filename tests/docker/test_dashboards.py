"""The Grafana dashboards: made from the table of metrics, laid out whole, and read by Grafana's own types."""

from __future__ import annotations

import json
import re
from importlib.metadata import version

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as grafana
from grafana_foundation_sdk.models import units

from bireme.config import CHECKOUT
from bireme.metrics import TABLE
from tests.docker.expressions import metrics_of
from tools import make_dashboards
from tools.dashboards import panels, serving
from tools.dashboards.queries import by, events, level, mean, quantile, share

BOARDS = {path.name: json.loads(path.read_text()) for path in sorted(make_dashboards.FOLDER.glob("*.json"))}
GRAPHS = [
    (name, panel)
    for name, board in BOARDS.items()
    for row in board["panels"]
    for panel in [row, *row.get("panels", [])]
    if panel["type"] != "row"
]
EXPRESSIONS = sorted({target["expr"] for _, panel in GRAPHS for target in panel["targets"]})
WHO_HAS_ENGINES = re.compile(r" (?:unless|and) on \(instance, worker\) bireme_engine_up")
ANNOTATIONS = [one for board in BOARDS.values() for one in board["annotations"]["list"]]
UNITS = {value for name, value in vars(units).items() if isinstance(value, str) and not name.startswith("_")}
COLUMNS = range(24)


def drawn_by(expression):
    """Return the metrics whose values an expression shows, not those that choose among its series."""
    return metrics_of(WHO_HAS_ENGINES.sub("", expression))


def cells_of(panel):
    place = panel["gridPos"]
    return {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}


def screens_of(board):
    """Return lists of panels that are seen together: those in the open, and those of each closed row."""
    closed = [[row, *row["panels"]] for row in board["panels"] if row.get("panels")]
    return [board["panels"], *closed]


def test_the_files_are_what_the_table_of_metrics_makes():
    assert make_dashboards.texts() == make_dashboards.present(), "run tools/make_dashboards.py"


def test_there_are_four_and_each_leads_to_the_others():
    assert set(BOARDS) == {"serving.json", "disaggregation.json", "kv.json", "routing.json"}
    assert len({board["uid"] for board in BOARDS.values()}) == len({board["title"] for board in BOARDS.values()}) == 4
    for board in BOARDS.values():
        (link,) = board["links"]
        assert link["type"] == "dashboards" and link["tags"] == board["tags"] and link["includeVars"]


def test_every_metric_that_is_drawn_exists():
    for expression in [*EXPRESSIONS, *(one["expr"] for one in ANNOTATIONS)]:
        found = metrics_of(expression)
        assert found and found <= TABLE.keys(), expression


def test_counters_are_drawn_as_rates_or_differences_and_histograms_by_their_series():
    for expression, name in [(one, name) for one in EXPRESSIONS for name in drawn_by(one)]:
        read = {
            "counter": rf"rate\({name}\{{|{name}\{{[^}}]*\}} offset",
            "histogram": rf"rate\({name}_(bucket|sum)\{{",
            "gauge": rf" \({name}\{{|(sum|max|avg)\({name}\{{",
        }
        assert re.search(read[TABLE[name].kind], expression), expression


def test_labels_that_an_expression_groups_by_are_the_metric_s_own():
    for expression in EXPRESSIONS:
        pairs = re.findall(r"(?:sum|max|avg) by \(([^)]*)\) \((?:rate\()?(\w+)\{", expression)
        assert len(pairs) == len(re.findall(r" by \(", expression)), expression
        for labels, series in pairs:
            (name,) = metrics_of(series)
            assert set(labels.split(", ")) <= {*TABLE[name].labels, "le"}, expression


def test_nothing_is_divided_by_what_may_be_zero():
    for expression in EXPRESSIONS:
        assert len(re.findall(r" / ", expression)) == len(re.findall(r" / \(.* > 0\)", expression)), expression
        assert "histogram_quantile" not in expression or expression.endswith(" >= 0"), expression


def test_what_counts_as_a_failure_is_what_the_alert_takes_for_one():
    rules = yaml.safe_load((CHECKOUT / "docker" / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    (alert,) = [rule["expr"] for rule in rules if rule["alert"] == "RequestsFail"]
    assert re.findall(r'outcome=~"([A-Z_|]+)"', alert) == [serving.FAILURES]


def test_every_metric_of_ours_is_drawn():
    drawn = {name for expression in EXPRESSIONS for name in drawn_by(expression)}
    assert [name for name in TABLE if name.startswith("bireme_") and name not in drawn] == []


@pytest.mark.parametrize("name", BOARDS)
def test_panels_fill_the_24_columns_line_by_line_and_none_lies_on_another(name):
    for screen in screens_of(BOARDS[name]):
        cells = [cell for panel in screen for cell in cells_of(panel)]
        assert len(cells) == len(set(cells))
        lines = {y for _, y in cells}
        assert lines == set(range(min(lines), max(lines) + 1))
        assert set(cells) == {(x, y) for x in COLUMNS for y in lines}


@pytest.mark.parametrize("name", BOARDS)
def test_panels_and_their_queries_have_numbers_of_their_own(name):
    inside = [panel for screen in screens_of(BOARDS[name])[1:] for panel in screen[1:]]
    numbers = [panel["id"] for panel in [*BOARDS[name]["panels"], *inside]]
    assert len(numbers) == len(set(numbers))
    for panel in [panel for board, panel in GRAPHS if board == name]:
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(letters) == len(set(letters))


def test_a_panel_says_what_it_means_and_in_which_unit():
    for board, panel in GRAPHS:
        where = f"{board}: {panel['title']}"
        for name in {name for target in panel["targets"] for name in drawn_by(target["expr"])}:
            assert f"`{name}`: {TABLE[name].help}" in panel["description"], where
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or re.fullmatch(r"si:[a-z]+/s", unit), where


@pytest.mark.parametrize("name", BOARDS)
def test_grafana_s_own_types_read_what_is_written(name):
    """The annotations have texts that the SDK's type has not."""
    board = {key: value for key, value in BOARDS[name].items() if key != "annotations"}
    again = json.loads(JSONEncoder().encode(grafana.Dashboard.from_json(board)))
    again.pop("annotations", None)
    assert again == board


def test_the_sdk_is_that_of_the_grafana_that_compose_starts():
    services = yaml.safe_load((CHECKOUT / "docker" / "compose.yaml").read_text())["services"]
    _, _, release = services["grafana"]["image"].partition(":")
    _, _, made_for = version("grafana-foundation-sdk").partition("!")
    assert made_for == release


def test_grafana_opens_with_a_dashboard_that_is_there():
    services = yaml.safe_load((CHECKOUT / "docker" / "compose.yaml").read_text())["services"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.rpartition("/")[2] in BOARDS


def test_the_data_source_begins_with_the_provisioned_one_and_every_query_takes_it():
    provisioned = CHECKOUT / "docker/grafana/provisioning/datasources/prometheus.yaml"
    (source,) = yaml.safe_load(provisioned.read_text())["datasources"]
    for board in BOARDS.values():
        (variable,) = [one for one in board["templating"]["list"] if one["type"] == "datasource"]
        assert variable["current"] == {"text": source["name"], "value": source["uid"]}
    queries = [query for _, panel in GRAPHS for query in [panel, *panel["targets"]]]
    assert {query["datasource"]["uid"] for query in [*queries, *ANNOTATIONS]} == {"${datasource}"}


@pytest.mark.parametrize("name", BOARDS)
def test_variables_that_queries_use_are_offered(name):
    offered = {one["name"] for one in BOARDS[name]["templating"]["list"]}
    used = {
        found
        for board, panel in GRAPHS
        if board == name
        for target in panel["targets"]
        for found in re.findall(r"\$(?!__)(\w+)", target["expr"])
    }
    assert used | {"datasource"} == offered


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: panels.lines("x", "bireme_no_such_metric"), "no metric bireme_no_such_metric"),
        (lambda: panels.rare("x", {"bireme_no_such_total": "it"}), "no metric bireme_no_such_total"),
        (
            lambda: panels.lines("x", "bireme_streams", choice=by("path")),
            "bireme_streams has no label path, only worker",
        ),
        (lambda: share("bireme_streams", "bireme_no_such"), "no metric bireme_no_such"),
        (lambda: level("bireme_requests_total"), "is a counter, read here as a gauge"),
        (lambda: events("bireme_streams"), "is a gauge, read here as a counter"),
        (lambda: quantile(0.5, "bireme_streams"), "is a gauge, read here as a histogram"),
        (lambda: mean("bireme_requests_total"), "is a counter, read here as a histogram"),
    ],
)
def test_a_panel_of_what_the_table_has_not_fails(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_check_finds_a_file_that_nobody_writes_and_one_that_was_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(make_dashboards, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["make_dashboards.py", "--check"])
    for name, text in make_dashboards.texts().items():
        (tmp_path / name).write_text(text)
    assert make_dashboards.main() == 0
    (tmp_path / "old.json").write_text("{}")
    assert make_dashboards.main() == 1
    (tmp_path / "old.json").unlink()
    (tmp_path / "kv.json").write_text("{}")
    assert make_dashboards.main() == 1
