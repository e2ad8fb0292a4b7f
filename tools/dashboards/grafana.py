"""A board as Grafana's objects: grafana-foundation-sdk has a type for each, and turns them into JSON."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as dashboard_builder
from grafana_foundation_sdk.builders import heatmap as heatmap_builder
from grafana_foundation_sdk.builders import prometheus as prometheus_builder
from grafana_foundation_sdk.builders import stat as stat_builder
from grafana_foundation_sdk.builders import timeseries as timeseries_builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard, heatmap, prometheus

from tools.dashboards.panels import Board, Limits, Panel, Row
from tools.dashboards.queries import OF_MODEL, Query, by

SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
PROVISIONED = dashboard.VariableOption(text="Prometheus", value="prometheus")  # provisioning/datasources names it so
EVERYTHING = dashboard.VariableOption(text="All", value="$__all")
TAG = "bireme"
COLUMNS = 24  # of Grafana's grid
HEIGHTS = {"number": 4}
HEIGHT = 8
BLUE, GREEN, YELLOW, RED = "blue", "green", "yellow", "red"
RESTARTS = "bireme_engine_restarts_total"

Variable = dashboard_builder.DatasourceVariable | dashboard_builder.QueryVariable
Graph = timeseries_builder.Panel | heatmap_builder.Panel | stat_builder.Panel


class _Restarts(dashboard.AnnotationQuery):
    """A mark for each engine start after the first; the SDK's own annotation has no text of Prometheus' labels."""

    def to_json(self) -> dict[str, object]:
        query = prometheus.Dataquery(expr=self.expr or "", ref_id="Anno")
        texts = {"titleFormat": "Engine of {{worker}} started again", "textFormat": "{{cause}}", "tagKeys": "worker"}
        return {**super().to_json(), "target": query, "step": "60s", **texts}


def json_of(board: Board) -> str:
    """Return the file of a board."""
    return JSONEncoder(indent=1).encode(dashboard_of(board)) + "\n"


def dashboard_of(board: Board) -> dashboard.Dashboard:
    builder = (
        dashboard_builder.Dashboard(board.title)
        .uid(f"bireme-{board.name}")
        .description(board.description)
        .tags([TAG])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(_links_to_the_others())
    )
    for variable in _variables(board):
        builder = builder.with_variable(variable)
    layout = _Layout(builder)
    for row in board.rows:
        layout.add(row)
    made = builder.build()
    made.annotations = dashboard.AnnotationContainer(list_val=[_restarts()])
    return made


class _Layout:
    """Places rows and panels from the top down, and numbers them."""

    def __init__(self, builder: dashboard_builder.Dashboard) -> None:
        self._builder = builder
        self._top = 0
        self._numbers = itertools.count(1)

    def add(self, row: Row) -> None:
        """Grafana keeps the panels of an open row beside it, those of a closed one inside; these take no room."""
        place = dashboard.GridPos(x=0, y=self._top, w=COLUMNS, h=1)
        title = dashboard_builder.Row(row.title).id(next(self._numbers)).collapsed(row.is_rare).grid_pos(place)
        graphs = list(self._placed(row.lines, self._top + 1))
        for _, graph in graphs if row.is_rare else []:
            title = title.with_panel(graph)
        self._builder.with_row(title)
        for _, graph in [] if row.is_rare else graphs:
            self._builder.with_panel(graph)
        self._top = self._top + 1 if row.is_rare else max(bottom for bottom, _ in graphs)

    def _placed(self, lines: Sequence[Sequence[Panel]], top: int) -> Iterator[tuple[int, Graph]]:
        """Yield the panels of a row, each with where its line ends."""
        for line in lines:
            width, height = COLUMNS // len(line), HEIGHTS.get(line[0].shape, HEIGHT)
            for index, panel in enumerate(line):
                place = dashboard.GridPos(x=index * width, y=top, w=width, h=height)
                yield top + height, _graph(panel).id(next(self._numbers)).grid_pos(place)
            top += height


def _graph(panel: Panel) -> Graph:
    graph = _drawn(panel).title(panel.title).description(panel.description).datasource(SOURCE).unit(panel.unit)
    for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False):
        graph = graph.with_target(_target(query, letter))
    return graph


def _drawn(panel: Panel) -> Graph:
    if panel.shape == "heatmap":
        return _heatmap(panel)
    return _number(panel) if panel.shape == "number" else _lines(panel)


def _target(query: Query, letter: str) -> prometheus_builder.Dataquery:
    form = prometheus.PromQueryFormat.HEATMAP if query.is_histogram else prometheus.PromQueryFormat.TIME_SERIES
    return (
        prometheus_builder.Dataquery()
        .datasource(SOURCE)
        .expr(query.expression)
        .legend_format(query.legend or "all")
        .format(form)
        .editor_mode(prometheus.QueryEditorMode.CODE)
        .range()
        .ref_id(letter)
    )


def _lines(panel: Panel) -> timeseries_builder.Panel:
    legend = (
        common_builder.VizLegendOptions()
        .show_legend(True)
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.BOTTOM)
        .calcs(["lastNotNull", "max"])
    )
    tooltip = common_builder.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    graph = (
        timeseries_builder.Panel()
        .legend(legend)
        .tooltip(tooltip)
        .min(0)
        .show_points(common.VisibilityMode.NEVER)
        .line_width(1)
        .fill_opacity(10)
    )
    if panel.shape in ("stacked", "parts of all"):
        mode = common.StackingMode.PERCENT if panel.shape == "parts of all" else common.StackingMode.NORMAL
        graph = graph.stacking(common_builder.StackingConfig().mode(mode).group("A")).fill_opacity(40)
    if panel.shape == "steps":
        graph = graph.line_interpolation(common.LineInterpolation.STEP_AFTER).decimals(0).no_value("none so far")
    if panel.top is not None:
        graph = graph.max(panel.top)
    if panel.limits:
        style = common_builder.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        graph = graph.thresholds(_thresholds(panel.limits)).thresholds_style(style)
    return graph


def _heatmap(panel: Panel) -> heatmap_builder.Panel:
    color = (
        heatmap_builder.HeatmapColorOptions()
        .mode(heatmap.HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .steps(64)
        .exponent(0.5)
    )
    return (
        heatmap_builder.Panel()
        .calculate(False)
        .color(color)
        .y_axis(heatmap_builder.YAxisConfig().unit(panel.unit).axis_placement(common.AxisPlacement.LEFT))
        .cell_gap(1)
        .cell_values(heatmap_builder.CellValues().unit("cps"))
        .show_value(common.VisibilityMode.NEVER)
        .show_y_histogram()
        .show_legend()
    )


def _number(panel: Panel) -> stat_builder.Panel:
    return (
        stat_builder.Panel()
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.VALUE)
        .text_mode(common.BigValueTextMode.VALUE)
        .reduce_options(common_builder.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("-")
        .thresholds(_thresholds(panel.limits))
    )


def _thresholds(limits: Limits | None) -> dashboard_builder.ThresholdsConfig:
    """Where a panel has none, one color has to be said: Grafana's own default turns red at 80 of anything."""
    steps: list[tuple[float | None, str]] = [(None, BLUE)]
    if limits and limits.yellow < limits.red:
        steps = [(None, GREEN), (limits.yellow, YELLOW), (limits.red, RED)]
    elif limits:
        steps = [(None, RED), (limits.red, YELLOW), (limits.yellow, GREEN)]
    return (
        dashboard_builder.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value=value, color=color) for value, color in steps])
    )


def _links_to_the_others() -> dashboard_builder.DashboardLink:
    return (
        dashboard_builder.DashboardLink("bireme")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(False)
        .include_vars(True)
        .keep_time(True)
    )


def _variables(board: Board) -> Iterator[Variable]:
    yield (
        dashboard_builder.DatasourceVariable("datasource").label("Data source").type("prometheus").current(PROVISIONED)
    )
    yield _label_variable("instance", "Server")
    yield _label_variable("worker", "Worker")
    panels = [panel for row in board.rows for line in row.lines for panel in line]
    if any(OF_MODEL in query.expression for panel in panels for query in panel.queries):
        yield _label_variable("model", "Model")


def _label_variable(name: str, label: str) -> dashboard_builder.QueryVariable:
    of_chosen = '{__name__=~"bireme_.+", instance=~"$instance"}' if name != "instance" else '{__name__=~"bireme_.+"}'
    return (
        dashboard_builder.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(f"label_values({of_chosen}, {name})")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(EVERYTHING)
    )


def _restarts() -> _Restarts:
    choice = by("worker", "cause")
    expression = choice.grouped("sum", f"increase({RESTARTS}{choice.of(RESTARTS)}[1m])") + " > 0"
    return _Restarts(name="Engine restarts", datasource=SOURCE, enable=True, icon_color=RED, expr=expression)
