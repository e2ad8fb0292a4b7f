"""A frontend without keys and a real browser: foreign pages can do nothing there, its own page and links work."""

import http.server
import threading

import pytest

from tests.openai.frontend_process import frontend_server
from tests.services.playground_page import Page
from tools.screenshots import browser

FOREIGN = "evil.example"
UPLOAD = """
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", new Blob(['{}']), "lines.jsonl");
    return fetch(arguments[0], {method: "POST", body: form, mode: "no-cors"}).then((reply) => reply.status);
"""
ASK = "return fetch(arguments[0]).then((reply) => reply.status);"
FOLLOW = "const link = document.createElement('a'); link.href = arguments[0]; document.body.append(link); link.click();"


@pytest.fixture(scope="module")
def pages():
    """A browser for which a foreign name is this machine's, too."""
    with browser(f"--host-resolver-rules=MAP {FOREIGN} 127.0.0.1") as driver:
        yield driver


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with frontend_server(tmp_path_factory.mktemp("foreign")) as running:
        yield running


@pytest.fixture(scope="module")
def foreign_site():
    """Serves a page; returns its address."""
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    yield f"http://{FOREIGN}:{site.server_port}/"
    site.shutdown()


class Empty(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>A page</title><body>")

    def log_message(self, *arguments):
        pass


@pytest.fixture
def own(server):
    return f"http://127.0.0.1:{server.port}/"


def files(server):
    return [file["filename"] for file in server.call("GET", "/v1/files")[1]["data"]]


def test_a_foreign_page_uploads_nothing(pages, server, own, foreign_site):
    page = Page(pages, own)
    pages.get(foreign_site)
    assert page.run(UPLOAD, f"{own}v1/files") == 0  # the page may not see what the answer was
    assert files(server) == [] and "path=/v1/files status=403" in server.log.read_text()


def test_a_foreign_name_for_this_machine_reads_nothing(pages, server, own):
    pages.get(own.replace("127.0.0.1", FOREIGN) + "health/live")
    page = Page(pages, own)
    assert [page.run(ASK, path) for path in ("/v1/files", "/v1/models", "/metrics")] == [403] * 3
    assert page.run(UPLOAD, "/v1/files") == 403 and files(server) == []


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_own_page_reads_and_uploads(pages, server, own, name):
    pages.get(own.replace("127.0.0.1", name))
    page = Page(pages, own)
    assert page.run(ASK, "/v1/models") == 200
    assert page.run(UPLOAD, "/v1/files") == 200 and "lines.jsonl" in files(server)


def test_a_link_of_a_foreign_page_leads_to_the_playground(pages, own, foreign_site):
    page = Page(pages, own)
    pages.get(foreign_site)
    page.run(FOLLOW, own)
    page.until(lambda: pages.current_url == own and page.find("#prompt"))
