"""What each API key has used, and the names of others on the frontend's page."""

import asyncio
import hashlib
import re

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.errors import UnavailableError
from bireme.metrics import Registry
from bireme.openai.accounts import OTHER, AccountNames
from bireme.openai.app import Frontend
from bireme.openai.keys import ApiKeys, KeyEntry
from bireme.openai.text.served_model import Models, ServedModel
from bireme.workers.fake import OWN_PREFILL_MS, FakeWorkers
from tests.openai.batch.test_batches import create, generating, lines, until
from tests.openai.conftest import letters

SERIES = re.compile(r'^bireme_key_(\w+?)(?:_tokens|_seconds)_total\{key="([^"]+)"[^}]*\} (\S+)$', re.MULTILINE)
DYNAMO = {"metrics": {"aliases": ["dynamo"]}}


def entry(name, key="", **more):
    return KeyEntry(name=name, sha256=hashlib.sha256((key or name).encode()).hexdigest(), **more)


def keys(*names):
    return ApiKeys(tuple(entry(name, operator=name == "ann") for name in names or ("ann", "bob")))


def bearer(name):
    return {"authorization": f"Bearer {name}"}


async def page(bench, caller="ann"):
    return (await bench.call("GET", "/metrics", None, bearer(caller)).end()).data.decode()


async def accounts(bench, caller="ann"):
    """Return key -> what it used."""
    found = {}
    for name, key, value in SERIES.findall(await page(bench, caller)):
        found.setdefault(key, {})[name] = float(value)
    return found


async def running(bench, count=1):
    async with asyncio.timeout(60):
        while len(bench.workers.running) < count:
            await asyncio.sleep(0.001)


async def answered(bench, num_tokens, reply):
    await running(bench)
    await bench.workers.emit(num_tokens)
    return await reply.end()


async def test_an_answer_is_charged_to_its_key(frontend):
    bench = await frontend(keys())
    usage = (await answered(bench, 4, bench.chat(bearer("bob")))).json()["usage"]
    own = (await accounts(bench))["bob"]
    assert own.pop("engine") == OWN_PREFILL_MS / 1e3
    assert own == {"prompt": usage["prompt_tokens"], "cached": 0, "computed": usage["prompt_tokens"], "generated": 4}


async def test_several_answers_share_a_prompt(frontend):
    bench = await frontend(keys())
    usage = (await answered(bench, 4, bench.chat(bearer("bob"), n=3))).json()["usage"]
    own = (await accounts(bench))["bob"]
    assert (own["prompt"], own["generated"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert own["computed"] == 3 * usage["prompt_tokens"]  # none was cached for the fake workers


async def test_a_prompt_of_prefill_is_charged_with_what_prefill_found(frontend):
    workers = {"decode": {"engine": "mocker"}, "prefill": {"engine": "mocker"}}
    ready = {"engine_config": {"cache_transceiver_config": {"backend": "DEFAULT"}}}
    bench = await frontend(keys(), workers={name: one | ready for name, one in workers.items()})
    usage = (await answered(bench, 4, bench.chat(bearer("bob")))).json()["usage"]
    own = (await accounts(bench))["bob"]
    assert (own["cached"], own["computed"], own["engine"]) == (1, usage["prompt_tokens"] - 1, 0.005)


async def test_who_leaves_is_charged_for_what_had_come(frontend):
    bench = await frontend(keys())
    reply = bench.chat(bearer("bob"), stream=True, max_tokens=50)
    await running(bench)
    await bench.workers.emit(3)
    reply.leave()
    await reply.end()
    own = (await accounts(bench))["bob"]
    assert own["generated"] == 3 and own["prompt"] == own["computed"] > 0 and own["engine"] > 0


async def test_who_leaves_before_the_first_token_and_who_is_refused_owe_nothing(frontend):
    bench = await frontend(keys())
    reply = bench.chat(bearer("bob"))
    await running(bench)
    reply.leave()
    await reply.end()
    assert set((await accounts(bench))["bob"].values()) == {0}
    await bench.chat(bearer("bob"), max_tokens=-1).end()
    assert set((await accounts(bench))["bob"].values()) == {0}


async def test_a_failed_stream_is_charged_for_what_had_come(frontend):
    bench = await frontend(keys(), pipeline={"migration_limit": 0})
    reply = bench.chat(bearer("bob"), stream=True, max_tokens=50)
    await running(bench)
    await bench.workers.emit(2)
    bench.workers.running[0].fail(UnavailableError("gone"))
    await asyncio.sleep(0)
    reply.leave()
    await reply.end()
    assert (await accounts(bench))["bob"]["generated"] == 2


async def test_lines_of_a_batch_are_charged_to_its_key(frontend, tmp_path):
    bench = await frontend(keys(), files_folder=tmp_path)
    async with generating(bench):
        told = (await create(bench, lines(3), headers=bearer("bob"))).json()
        await until(bench, told["id"], headers=bearer("bob"))
    own = (await accounts(bench))["bob"]
    assert own["generated"] == 12 and own["prompt"] == own["computed"] > 0


async def test_a_background_response_is_charged_to_its_key(frontend):
    bench = await frontend(keys())
    body = {"model": "test", "input": "hi", "max_output_tokens": 4, "background": True}
    assert (await bench.call("POST", "/v1/responses", body, bearer("bob")).end()).status == 200
    await running(bench)
    await bench.workers.emit(4)
    async with asyncio.timeout(60):
        while "bob" not in (found := await accounts(bench)):
            await asyncio.sleep(0.001)
    assert found["bob"]["generated"] == 4


async def test_other_keys_are_not_shown(frontend):
    bench = await frontend(keys())
    for name in ("ann", "bob"):
        await answered(bench, 4, bench.chat(bearer(name)))
    assert set(await accounts(bench)) == {"ann", "bob"} and set(await accounts(bench, "bob")) == {"bob"}


async def test_a_key_that_is_replaced_keeps_its_account_and_the_old_one_may_end(frontend):
    own = keys()
    bench = await frontend(own)
    reply = bench.chat(bearer("bob"))
    await running(bench)
    own.replace((entry("ann", operator=True), entry("bob", "renewed")))
    await answered(bench, 4, reply)
    await answered(bench, 4, bench.chat(bearer("renewed")))
    assert (await accounts(bench))["bob"]["generated"] == 8


def test_more_keys_than_may_have_accounts_share_one():
    names = AccountNames(keys("a", "b", "c"), max_accounts=2)
    salts = [keys(name).tenant([f"Bearer {name}".encode()]).cache_salt("") for name in "abca"]
    assert [names.of(salt) for salt in salts] == ["a", "b", OTHER, "a"]
    assert names.of("nobodys") == OTHER


async def test_no_key_no_account(frontend):
    bench = await frontend()
    await answered(bench, 4, bench.chat())
    assert "bireme_key_" not in (await bench.call("GET", "/metrics").end()).data.decode()
    bench = await frontend(keys(), metrics={"max_accounts": 0})
    await answered(bench, 4, bench.chat(bearer("bob")))
    assert "bireme_key_" not in await page(bench)


async def test_dynamos_names_tell_models_apart(bench_of):
    def model(name):
        fields = {"model": "none", "workers": {"decode": {"engine": "mocker"}}, "name": name, **DYNAMO}
        return ServedModel(convert(fields, Recipe, name), FakeWorkers(), letters(), Registry("frontend"))

    models = [model("test"), model("other")]
    app = Frontend(Models(models), Registry("frontend"))
    await app.start()
    bench = bench_of(app, models[0].services.workers)
    await answered(bench, 4, bench.chat())
    text = (await bench.call("GET", "/metrics").end()).data.decode()
    await app.stop()
    assert 'dynamo_frontend_output_tokens_total{model="test"} 4.0' in text
    assert 'dynamo_frontend_output_tokens_total{model="other"}' not in text
    assert 'dynamo_frontend_active_requests{model="other"} 0.0' in text
    assert 'bireme_requests_total{outcome="length",worker="frontend"} 1.0' in text


async def test_dynamos_names_tell_of_requests_under_way(frontend):
    bench = await frontend(**DYNAMO)
    replies = [bench.chat(), bench.chat()]
    await running(bench, 2)
    bench.workers.running[0].emit()
    text = (await bench.call("GET", "/metrics").end()).data.decode()
    assert 'dynamo_frontend_active_requests{model="test"} 2.0' in text
    assert 'dynamo_frontend_queued_requests{model="test"} 1.0' in text
    assert 'dynamo_frontend_stage_requests{model="test",phase="",stage="dispatch"} 1.0' in text
    for reply in replies:
        await answered(bench, 4, reply) if not reply.task.done() else await reply.end()
    text = (await bench.call("GET", "/metrics").end()).data.decode()
    assert 'dynamo_frontend_requests_total{model="test",status="success"} 2.0' in text
    assert 'dynamo_frontend_queued_requests{model="test"} 0.0' in text
