"""A planner's decisions as Prometheus metrics, on a page of its own port."""

from __future__ import annotations

import http.server

from bireme.errors import ConfigError
from bireme.launch.health_server import SmallHttpServer
from bireme.metrics import Registry
from bireme.openai.metrics_page import CONTENT_TYPE, MetricsPage
from bireme.scaling.plan_record import PlanRecord

_CAUSES = ("missing", "stale", "absurd", "clocks apart", "gap", "contradictory", "nothing new", "failed")
_OTHER = "other"


class PlannerMetrics:
    """`start`, `stop`."""

    def __init__(self, host: str, port: int) -> None:
        """`port`: 0: any free one. Raises ConfigError."""
        self._registry = Registry("planner")
        self._registry.start("bireme_planner_failures_total")
        self._page = MetricsPage(self._registry)
        try:
            self._server = SmallHttpServer(host, port, _handler(self._page))
        except OSError as error:
            raise ConfigError(f"--metrics-port {port}: {host} can't be listened on ({error})") from error
        self.port = self._server.port

    def start(self) -> None:
        self._server.start("planner-metrics")

    def stop(self) -> None:
        self._server.stop()

    def count(self, record: PlanRecord) -> None:
        metrics = self._registry
        metrics.add("bireme_planner_decisions_total", 1, record.result)
        if record.result == "hold":
            metrics.add("bireme_planner_holds_total", 1, _cause_of(record.reason))
        if record.failure:
            metrics.add("bireme_planner_failures_total")
        metrics.set("bireme_planner_acts", record.acts)
        metrics.set("bireme_planner_decided_at_seconds", record.at)
        metrics.set("bireme_planner_budget_gpus", record.max_gpus)
        if record.requests_per_s is not None:
            metrics.set("bireme_planner_requests_per_second", record.requests_per_s)
        for name, stage in record.stages.items():
            metrics.set("bireme_planner_workers_wanted", stage.wanted, name)
            for state, count in (("ready", stage.ready), ("starting", stage.starting), ("ending", stage.ending)):
                metrics.set("bireme_planner_workers", count, name, state)


def _cause_of(reason: str) -> str:
    problem = reason.removeprefix("hold: ")
    return next((cause for cause in _CAUSES if problem.startswith(cause)), _OTHER).replace(" ", "_")


def _handler(page: MetricsPage) -> type[http.server.BaseHTTPRequestHandler]:
    class PlannerPage(http.server.BaseHTTPRequestHandler):
        server_version = "bireme"
        sys_version = ""

        def do_GET(self) -> None:
            is_known = self.path.split("?")[0] == "/metrics"
            body = page.text() if is_known else b"known paths: /metrics\n"
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", CONTENT_TYPE.decode() if is_known else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Scrapes come every few seconds."""

    return PlannerPage
