"""Every panel's query on a real Prometheus that scrapes every metric of the table, at work and at rest."""

import http.server
import math
import threading
import time

import pytest

from bireme.metrics import TABLE, Registry
from bireme.openai.metrics_page import MetricsPage
from tests.services.dashboard_queries import queries
from tests.services.prometheus import Prometheus

ENGINES, CLIENTS = ("prefill", "decode"), ("frontend",)
CHOSEN = {"direction": "import"}  # values that a panel asks for
WINDOW = "2s"
LIMIT_S = 30.0


class Site(http.server.ThreadingHTTPServer):
    """A page of metrics; while it is at work, each has changed whenever it is asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Page)
        self.is_at_work = True
        self.registry = Registry()
        self.page = MetricsPage(self.registry)
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def text(self):
        with self._lock:
            for spec in TABLE.values() if self.is_at_work else ():
                self._change(spec)
            return self.page.text()

    def _change(self, spec):
        more = [CHOSEN.get(label, f"a {label}") for label in spec.labels[1:]]
        workers = ENGINES if spec.name == "bireme_engine_up" else ENGINES + CLIENTS
        change = {"counter": self.registry.add, "gauge": self.registry.set, "histogram": self.registry.observe}
        for worker in workers:
            change[spec.kind](spec.name, 1, worker, *more)


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.server.text()
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *parts):
        pass


@pytest.fixture(scope="module")
def site():
    running = Site()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture(scope="module")
def prometheus(site, tmp_path_factory):
    with Prometheus(tmp_path_factory.mktemp("dashboards"), [f"127.0.0.1:{site.server_port}"]) as running:
        yield running


QUERIES = queries(WINDOW)


def wait_until(holds):
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_each_panel_has_finite_values_at_work_and_none_that_is_not_a_number_at_rest(site, prometheus):
    wait_until(lambda: prometheus.ask(f"rate(bireme_requests_total[{WINDOW}]) > 0"))
    answers = {query: prometheus.ask(query[1]) for query in QUERIES}
    assert [title for (title, _), series in answers.items() if not series] == []
    values = [(title, value) for (title, _), series in answers.items() for _, value in series]
    assert [one for one in values if not (math.isfinite(one[1]) and one[1] >= 0)] == []
    site.is_at_work = False
    wait_until(lambda: not prometheus.ask(f"rate(bireme_requests_total[{WINDOW}]) > 0"))
    values = [(title, value) for title, expression in QUERIES for _, value in prometheus.ask(expression)]
    assert values and [one for one in values if not math.isfinite(one[1])] == []
