"""Who may call, and how much a minute."""

import asyncio
import hashlib
import re

import pytest

from bireme.errors import ConfigError
from bireme.openai.app import OPEN_PATHS
from bireme.openai.keys import OPEN, ApiKeys, KeyEntry, load_keys
from bireme.openai.token_bucket import TokenBucket

KEY = "br-secret"


def keys(**limits):
    return ApiKeys((KeyEntry(name="alice", sha256=hashlib.sha256(KEY.encode()).hexdigest(), **limits),))


def bearer(key=KEY):
    return {"authorization": f"Bearer {key}"}


async def answered(bench, **fields):
    reply = bench.chat(bearer(), **fields)
    if reply.task.done():
        return reply
    await bench.workers.emit(4)
    return await reply.end()


WRONG = [
    "",
    "Bearer",
    "Bearer ",
    "Bearer br-secre",
    "Bearer br-secrets",
    "Bearer BR-SECRET",
    "Basic br-secret",
    "Bearer \xe4",
]


@pytest.mark.parametrize("header", [*WRONG, "Bearer \xe4"])
async def test_a_wrong_key_is_401(frontend, header):
    bench = await frontend(keys())
    reply = await bench.chat({"authorization": header}).end()
    assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer"


async def test_a_key_may_come_as_x_api_key(frontend):
    bench = await frontend(keys())
    for headers in ({"x-api-key": KEY}, {"x-api-key": KEY, **bearer()}):
        assert (await bench.call("GET", "/v1/models", None, headers).end()).status == 200


@pytest.mark.parametrize("headers", [{"x-api-key": "br-secre"}, {"x-api-key": ""}, {"x-api-key": "other", **bearer()}])
async def test_a_wrong_x_api_key_is_401(frontend, headers):
    assert (await (await frontend(keys())).call("GET", "/v1/models", None, headers).end()).status == 401


async def test_the_right_key_is_let_in(frontend):
    assert (await answered(await frontend(keys()))).status == 200


PATHS = ["/v1/models", "/v1/models/test", "/metrics", "/openapi.json", "/tokenize", "/nothing", "/health/live/"]


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_key_all_but_the_health_and_the_page_is_closed(frontend, path):
    bench = await frontend(keys())
    assert (await bench.call("GET", path).end()).status == 401
    assert (await bench.call("GET", path, None, {"host": "localhost/health/live"}).end()).status == 400


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probes_need_no_key(frontend, path):
    assert (await (await frontend(keys())).call("GET", path).end()).status == 200


async def test_requests_beyond_a_minutes_worth_wait(frontend):
    bench = await frontend(keys(requests_per_minute=1))
    assert (await answered(bench)).status == 200
    reply = await bench.chat(bearer()).end()
    assert reply.status == 429 and 1 <= int(reply.headers["retry-after"]) <= 60
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"


async def test_tokens_beyond_a_minutes_worth_wait(frontend):
    bench = await frontend(keys(tokens_per_minute=25))
    assert (await answered(bench)).status == 200
    assert (await bench.chat(bearer()).end()).status == 429


async def test_a_keys_requests_under_way_are_limited(frontend):
    bench = await frontend(keys(max_concurrent_requests=1))
    first = bench.chat(bearer())
    await bench.workers.reached("decode")
    assert (await bench.chat(bearer()).end()).status == 429
    await bench.workers.emit(4)
    assert (await first.end()).status == 200


async def test_a_tenants_prompts_share_no_blocks_with_others(frontend):
    salts = []
    for tenant in (keys(), None):
        bench = await frontend(tenant)
        reply = bench.chat(bearer(), bireme={"cache_salt": "mine"})
        await bench.workers.reached("decode")
        salts.append(bench.workers.running[0].request.options.cache_salt)
        reply.leave()
        await reply.end()
    assert salts[1] == "mine" and salts[0].endswith(".mine") and KEY not in salts[0]


def test_a_key_file_is_read_and_its_mistakes_are_named(tmp_path):
    path = tmp_path / "keys.yaml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text(f"keys:\n  - {{name: alice, sha256: {digest}, requests_per_minute: 5}}\n")
    assert load_keys(path).tenant([f"Bearer {KEY}".encode()]).name == "alice"
    path.write_text(f"keys:\n  - {{name: alice, sha: {digest}}}\n")
    with pytest.raises(ConfigError, match="sha256"):
        load_keys(path)


def test_a_bucket_refills_with_time_and_may_be_overdrawn():
    now = [0.0]
    bucket = TokenBucket(60, lambda: now[0])
    bucket.take(90)
    assert bucket.wait_s(1) == 31
    now[0] = 31
    assert bucket.wait_s(1) == 0


def test_a_launcher_s_canaries_are_let_in_beside_the_file_s_keys(tmp_path, monkeypatch):
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{name: alice, sha256: {hashlib.sha256(KEY.encode()).hexdigest()}}}]")
    monkeypatch.setenv("BIREME_CANARY_KEY", "drawn-at-the-start")
    found = load_keys(path)
    assert found.tenant([b"Bearer drawn-at-the-start"]) is OPEN
    assert found.tenant([f"Bearer {KEY}".encode()]).name == "alice"


@pytest.mark.parametrize(
    ("asked", "given"),
    [({}, 0.4), ({"bireme": {"priority": 0.9}}, 0.4), ({"service_tier": "priority"}, 0.4), ({"priority": -5}, 0.4)]
    + [({"bireme": {"priority": 0.1}}, 0.1), ({"service_tier": "flex"}, 0.25)],
)
async def test_no_request_goes_before_what_its_key_may(frontend, asked, given):
    bench = await frontend(keys(max_priority=0.4))
    assert await priority_of(bench, **asked) == given


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize(
    ("asked", "ceiling", "told"),
    [("priority", 0.8, "priority"), ("priority", 0.6, "default"), ("fast", 0.4, "flex"), ("auto", 0.4, "flex")]
    + [("flex", 0.1, "flex")],
)
async def test_an_answer_tells_the_tier_that_its_key_s_ceiling_has_left(frontend, path, asked, ceiling, told):
    bench = await frontend(keys(max_priority=ceiling))
    what = (
        {"input": "hi", "max_output_tokens": 4}
        if path == "responses"
        else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    )
    reply = bench.call("POST", f"/v1/{path}", {"model": "test", "service_tier": asked, **what}, bearer())
    await bench.workers.emit(4)
    assert (await reply.end()).json()["service_tier"] == told


async def test_a_key_without_a_ceiling_has_everybody_s_range(frontend):
    assert await priority_of(await frontend(keys()), bireme={"priority": 0.9}) == 0.9


async def priority_of(bench, **fields):
    """Return the priority with which a chat reaches its worker."""
    reply = bench.chat(bearer(), **fields)
    emitting = asyncio.ensure_future(bench.workers.emit(4))
    while not bench.workers.running:
        await asyncio.sleep(0)
    priority = bench.workers.running[0].request.options.priority
    await emitting
    assert (await reply.end()).status == 200
    return priority


@pytest.fixture
async def limited(frontend):
    """Return a frontend with the keys alice and bob, whose limits are used up, and that of an operator."""
    entries = [
        KeyEntry(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), operator=name == "root", **more)
        for name, more in {"alice": {"requests_per_minute": 1}, "bob": {"requests_per_minute": 1}, "root": {}}.items()
    ]
    bench = await frontend(ApiKeys(tuple(entries)))
    for name in ("alice", "bob") * 2:
        await bench.call("POST", "/tokenize", b'{"model":"test","prompt":"a"}', bearer(name)).end()
    return bench


@pytest.mark.parametrize(("caller", "named"), [("alice", {"alice"}), ("bob", {"bob"}), ("root", {"alice", "bob"})])
async def test_metrics_name_other_keys_to_operators_alone(limited, caller, named):
    page = (await limited.call("GET", "/metrics", None, bearer(caller)).end()).data.decode()
    assert set(re.findall(r'bireme_rate_limited_total\{[^}]*key="(\w+)"', page)) == named
    assert "bireme_http_requests_total" in page and not [name for name in {"alice", "bob"} - named if name in page]


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/ping"])
@pytest.mark.parametrize(("caller", "is_told"), [(None, False), ("alice", False), ("wrong", False), ("root", True)])
async def test_of_workers_operators_alone_are_told(limited, path, caller, is_told):
    reply = await limited.call("GET", path, None, bearer(caller) if caller else {}).end()
    assert reply.status == 200 and reply.json()["status"] == "ready"
    assert ("models" in reply.json()) == is_told and (is_told or len(reply.json()) == 1)


async def test_without_keys_everybody_is_told_of_workers(frontend):
    assert "models" in (await (await frontend()).call("GET", "/health/ready").end()).json()
