"""What web pages may not do without keys: use the server under a name of their own, or from another site."""

import msgspec
import pytest

from bireme.config import FrontendConfig
from bireme.openai.http.browser_guard import BrowserGuard
from bireme.openai.http.call import Call
from bireme.openai.http.error_replies import HttpError
from bireme.openai.keys import ApiKeys, KeyEntry

FILES = "/v1/files"
ALLOWED = {"allowed_hosts": ["Chat.example", ".inside.example"]}
OWN = ["localhost", "LOCALHOST:9000", "localhost.:9000", "a.localhost:1", "127.0.0.1:9000", "127.1.2.3", "[::1]:9000"]
FOREIGN = [
    "evil.example:9000",
    "localhost.evil.example",
    "127.0.0.1.evil.example:9000",
    "192.168.1.5:9000",
    "[fe80::1]",
]


async def status(bench, headers, method="GET", path=FILES):
    reply = await bench.call(method, path, headers=headers).end()
    if reply.status == 403:
        error = reply.json()["error"]
        remedy = "this server's own page" if error["code"] == "foreign_sec_fetch_site" else "frontend.allowed_hosts"
        assert remedy in error["message"]
    return reply.status


@pytest.mark.parametrize("host", OWN)
async def test_own_names_are_served(frontend, host):
    assert await status(await frontend(), {"host": host}) == 200


@pytest.mark.parametrize("host", FOREIGN)
async def test_a_name_of_somebody_elses_is_refused(frontend, host):
    bench = await frontend()
    assert [await status(bench, {"host": host}) for _ in range(2)] == [403, 403]


async def test_names_of_the_recipe_are_served(frontend):
    bench = await frontend(frontend=ALLOWED)
    for host, expected in {
        "chat.example": 200,
        "a.inside.example:9000": 200,
        "inside.example": 403,
        "b.chat.example": 403,
    }.items():
        assert await status(bench, {"host": host}) == expected


@pytest.mark.parametrize("host", ["*", "", ".", "*.example", "chat.example:9000", "http://chat.example"])
def test_what_is_no_name_is_refused_as_one(host):
    with pytest.raises(msgspec.ValidationError, match="allowed_hosts"):
        msgspec.convert({"allowed_hosts": [host]}, FrontendConfig)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://localhost:9000"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ],
    ids=str,
)
async def test_what_another_sites_page_sends_is_refused(frontend, headers):
    assert await status(await frontend(), {"host": "localhost:9000", **headers}, "POST") == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:9000", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
        {"origin": "https://chat.example", "sec-fetch-site": "same-origin"},
    ],
    ids=["own page", "typed", "followed a link", "behind a proxy"],
)
async def test_own_pages_and_links_are_served(frontend, headers):
    assert await status(await frontend(frontend=ALLOWED), {"host": "localhost:9000", **headers}) == 200


async def test_probes_and_the_playground_answer_under_any_name(frontend):
    bench = await frontend()
    for path in ("/health/live", "/ping", "/"):
        assert await status(bench, {"host": "evil.example"}, path=path) in (200, 503)


async def test_with_keys_no_name_is_asked_for(frontend):
    bench = await frontend(ApiKeys((KeyEntry(name="a", sha256="0" * 64),)))
    assert await status(bench, {"host": "evil.example", "origin": "http://evil.example"}) == 401


@pytest.mark.parametrize(("host", "is_served"), [("10.0.0.5:9000", True), ("[fe80::1]", True), ("gpu-1", False)])
@pytest.mark.parametrize("bound_to", ["0.0.0.0", "::"])
def test_a_port_that_is_open_to_a_network_is_reached_by_any_address(bound_to, host, is_served):
    guard, call = BrowserGuard(bound_to, ()), Call(scope(host), None, None)
    if is_served:
        guard.check(call)
    else:
        with pytest.raises(HttpError, match="host: gpu-1; it is none of this server's names"):
            guard.check(call)


def test_the_name_that_the_port_is_bound_to_is_its_own():
    BrowserGuard("gpu-1", ()).check(Call(scope("GPU-1:9000"), None, None))


def scope(host):
    return {"path": FILES, "method": "GET", "headers": [(b"host", host.encode())]}
