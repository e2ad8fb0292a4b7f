"""A real server and a frontend without one, on a real etcd and nats-server that go, or hold what does not fit."""

import json
import re
import urllib.request

import msgspec
import pytest

from benchmarks.chaos.cluster import Cluster, ask, topology, wait_for
from benchmarks.chaos.questions import make_questions, mocker_answer
from bireme.config import DiscoveryConfig

LIMIT_S = 90
LEASE_S = DiscoveryConfig().lease_s
ONE = topology("a")


@pytest.fixture(scope="module")
def cluster(sample_model, tmp_path_factory):
    sample_model("llama")
    with Cluster(tmp_path_factory.mktemp("outages"), launches=("a",), num_frontends=1) as running:
        running.start()
        yield running


@pytest.fixture(autouse=True)
def all_is_well(cluster):
    until(cluster, lambda report: report["status"] == "ready")


def until(cluster, condition):
    wait_for(lambda: all(report and condition(report) for report in cluster.reports()), LIMIT_S, f"{cluster.reports()}")


@pytest.fixture(scope="module")
def question(cluster):
    """A text and its only right answer."""
    (prompt,) = make_questions(ONE.model, mocker_answer(ONE.model), seed=1, count=1)["text"].prompts
    return prompt


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
        return json.load(reply)


def assert_served(cluster, question):
    """Rightly, by the launch's own pipeline, and through the frontend."""
    launch, frontend = cluster.launches["a"], cluster.frontends[0]
    asked = {"text_input": question.message, "max_tokens": len(question.expected)}
    answer = post(f"http://{launch.addresses['http']}/v2/models/completion/generate", asked)
    assert answer["output_ids"] == list(question.expected)
    asked = {"model": ONE.served_name, "prompt": question.message, "max_tokens": len(question.expected)}
    answer = post(f"http://{frontend.address}/v1/completions", asked | {"ignore_eos": True})
    assert answer["choices"][0]["text"] == question.text


def views(report):
    """Return what a launch, or a frontend for each of its models, says of discovery."""
    told = report["discovery"]
    return [told] if "current" in told else list(told.values())


def gone_for_s(report):
    return min(float(re.search(r"\(for (\d+) s\)", one["reason"] + "(for 0 s)")[1]) for one in views(report))


def test_while_etcd_is_gone_for_longer_than_a_lease_the_last_view_serves(cluster, question):
    cluster.etcd.kill()
    until(cluster, lambda report: report["status"] == "degraded" and gone_for_s(report) > 1.5 * LEASE_S)
    for report in cluster.reports():
        assert all(not one["current"] and "etcd at http://127.0.0.1" in one["reason"] for one in views(report))
    assert_served(cluster, question)
    cluster.etcd.start()
    until(cluster, lambda report: report["status"] == "ready")
    assert {name.split("@")[0] for name in cluster.records()} == {"prefill", "decode"}
    assert_served(cluster, question)


def test_a_frontend_that_starts_without_etcd_says_why_it_is_not_ready_and_serves_once_it_is_there(cluster):
    cluster.etcd.kill()
    late = cluster.make_frontend(1)
    try:
        late.spawn()
        wait_for(lambda: ask(late.address).get("status") == "not_ready", LIMIT_S, "no answer")
        wait_for(lambda: "etcd at" in views(ask(late.address))[0]["reason"], LIMIT_S, "no reason")
        cluster.etcd.start()
        wait_for(lambda: ask(late.address)["status"] == "ready", LIMIT_S, "not ready")
    finally:
        late.stop()


def test_while_nats_is_gone_the_last_view_of_blocks_and_load_serves(cluster, question):
    cluster.nats.kill()
    until(cluster, lambda report: report["status"] == "degraded")
    launch, frontend = cluster.reports()
    assert not any(worker["publishes"] for worker in launch["workers"].values())
    assert "NATS" in frontend["routing"][ONE.served_name]
    assert_served(cluster, question)
    cluster.nats.start()


STRANGERS = {
    "model": ({"model": "other"}, "it serves other as mocker-disagg, this recipe tiny-llama"),
    "block": ({"tokens_per_block": 16}, "tokens_per_block: 16; decode workers here have 32"),
    "key": ({"key_id": "none of ours"}, "give all servers one BIREME_KEY"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_worker_that_does_not_fit_is_refused_by_name_and_the_others_serve(cluster, question, kind):
    different, reason = STRANGERS[kind]
    with cluster.store() as store:
        known = next(one for one in store.read().values() if one.stage == "decode")
        stranger = msgspec.structs.replace(known, worker="decode_7", server="127.0.0.1:1", launch="", **different)
        store.hold(stranger)
        until(cluster, lambda report: all(reason in one["refused"].get(stranger.id, "") for one in views(report)))
        assert {report["status"] for report in cluster.reports()} == {"degraded"}
        assert_served(cluster, question)
        store.withdraw()
