"""Loads out of metrics: pages as Triton writes them, and a server that answers as Prometheus does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from bireme.errors import ConfigError
from tools.advising.measured_load import of_pages, of_prometheus


def page(tmp_path, name, requests):
    lines = []
    for worker, share in (("decode", 0.25), ("decode_1", 0.75)):
        lines += [
            f'bireme_prompt_tokens_count{{worker="{worker}"}} {requests * share:g}',
            f'bireme_prompt_tokens_sum{{worker="{worker}"}} {requests * share * 900:g}',
            f'bireme_completion_tokens_sum{{worker="{worker}"}} {requests * share * 50:g}',
        ]
    lines += [f'bireme_cached_prompt_tokens_total{{worker="prefill"}} {requests * 300:g}']
    lines += ['bireme_prompt_tokens_count{worker="prefill"} 1e6']  # each request once
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_one_page_tells_lengths_and_two_the_rate(tmp_path):
    pages = [page(tmp_path, "before", 40), page(tmp_path, "after", 160)]
    one, both = of_pages(pages[:1], None), of_pages(pages, 60.0)
    assert one.requests_per_s is None and both.requests_per_s == 2.0
    assert (both.prompt_tokens, both.output_tokens, both.cached_tokens) == (900, 50, 300)


def test_pages_that_tell_nothing_are_refused_by_name(tmp_path):
    pages = [page(tmp_path, "after", 160), page(tmp_path, "before", 40)]
    with pytest.raises(ConfigError, match="before: counters are below"):
        of_pages(pages, 60.0)
    with pytest.raises(ConfigError, match="--apart-s"):
        of_pages(pages, None)
    with pytest.raises(ConfigError, match="no request at a decode worker"):
        of_pages([page(tmp_path, "idle", 0)], None)


@pytest.fixture
def prometheus():
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            query = parse_qs(urlsplit(self.path).query)["query"][0]
            name = next(one for one in FIGURES if one in query)
            values = [[1000.0 + 300 * at, str(value)] for at, value in enumerate(FIGURES[name])]
            body = json.dumps({"data": {"result": [{"metric": {}, "values": values}] if "cold" not in query else []}})
            self.send_response(503 if "starting" in query else 200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


FIGURES = {
    "bireme_prompt_tokens_count": [30, 600, "NaN"],
    "bireme_prompt_tokens_sum": [3000, 600_000, "NaN"],
    "bireme_completion_tokens_sum": [300, 30_000, 0],
    "bireme_cached_prompt_tokens_total": [0, 60_000, 0],
}


def test_the_busiest_stretch_of_prometheus_counts(prometheus):
    found = of_prometheus(prometheus, 1.0, 300.0)
    assert found.requests_per_s == 2.0
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (1000, 50, 100)


def test_a_server_that_knows_nothing_or_is_none_is_said_so(prometheus):
    with pytest.raises(ConfigError, match="no bireme_prompt_tokens_count .* have it scrape the launch's metrics port"):
        of_prometheus(prometheus, 1.0, 300.0, 'instance="cold"')
    with pytest.raises(ConfigError, match="with HTTP 503: .*; try again later"):
        of_prometheus(prometheus, 1.0, 300.0, 'instance="starting"')
    with pytest.raises(ConfigError, match="--hours 0.01, --stretch-s 300: 0.12 stretches"):
        of_prometheus(prometheus, 0.01, 300.0)
    with pytest.raises(ConfigError, match="begins with http"):
        of_prometheus("file:///etc/passwd", 1.0, 300.0)
    with pytest.raises(ConfigError, match="no answer of a Prometheus server"):
        of_prometheus("http://127.0.0.1:9", 1.0, 300.0)
