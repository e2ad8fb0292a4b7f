"""What probes are told, by a real server and a frontend without one, when anything that they need is gone.

etcd and nats-server are real too. docs/discovery.md, "What probes are told", has a row for each test.
"""

import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request

import msgspec
import pytest

from benchmarks.chaos.cluster import Cluster, ask, topology, wait_for
from benchmarks.chaos.launch import STOP_S, send_signal
from benchmarks.chaos.questions import make_questions, mocker_answer
from benchmarks.load.metrics_page import gauges, read_page
from bireme.settings import DiscoveryConfig
from tools import drain

LIMIT_S = 300
LEASE_S = DiscoveryConfig().lease_s
ONE = topology("a")
WELL, OLD = ("200", "200 ready", "200 ready"), ("200", "200 degraded", "200 degraded")


@pytest.fixture(scope="module")
def cluster(sample_model, tmp_path_factory):
    sample_model("llama")
    with Cluster(tmp_path_factory.mktemp("outages"), launches=("a",), num_frontends=1) as running:
        running.start()
        yield running


@pytest.fixture(autouse=True)
def all_is_well(cluster):
    for service in (cluster.etcd, cluster.nats):
        if not service.is_running:  # a test that failed has left it so
            service.start()
    wait_for(lambda: told(cluster) == WELL, LIMIT_S, "not all is well")


def told(cluster):
    """Return what Triton's /v2/health/ready, the launch's /health/ready and the frontend's say."""
    return tuple(map(probe, probes(cluster)))


def probes(cluster):
    addresses, frontend = cluster.launches["a"].addresses, cluster.frontends[0]
    asked = ((addresses["http"], "/v2"), (addresses["health"], ""), (frontend.address, ""))
    return [f"http://{address}{prefix}/health/ready" for address, prefix in asked]


def probe(url):
    """Return the HTTP status, and the body's where it has one."""
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as reply:
            code, body = reply.status, reply.read()
    except urllib.error.HTTPError as refusal:  # Triton's has a body of its own
        code, body = refusal.code, refusal.read() if "/v2" not in url else b""
    except OSError:
        return "nobody"
    return f"{code} {json.loads(body)['status']}" if body else str(code)


def metric(cluster, name):
    """Return its values: of the launch's page, of the frontend's."""
    pages = cluster.launches["a"].addresses["metrics"], cluster.frontends[0].address
    return [set(gauges(read_page(address), [name]).values()) for address in pages]


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
    asked = {"text_input": question.message, "max_tokens": len(question.expected)}
    answer = post(f"http://{cluster.launches['a'].addresses['http']}/v2/models/completion/generate", asked)
    assert answer["output_ids"] == list(question.expected)
    assert_answers(cluster.frontends[0], question)


def assert_answers(frontend, question):
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
    wait_for(lambda: told(cluster) == OLD, LIMIT_S, "somebody does not tell")
    wait_for(lambda: metric(cluster, "bireme_discovery_stale") == [{1.0}, {1.0}], LIMIT_S, "no metric tells")
    for report in cluster.reports():
        assert all(not one["current"] and "etcd at http://127.0.0.1" in one["reason"] for one in views(report))
    assert_served(cluster, question)
    cluster.etcd.start()
    until(cluster, lambda report: report["status"] == "ready")
    wait_for(lambda: metric(cluster, "bireme_discovery_stale") == [{0.0}, {0.0}], LIMIT_S, "a metric is behind")
    assert {name.split("@")[0] for name in cluster.records()} == {"prefill", "decode"}
    assert_served(cluster, question)


def test_a_frontend_that_starts_without_etcd_says_why_it_is_not_ready_and_serves_once_it_is_there(cluster, question):
    cluster.etcd.kill()
    late = cluster.make_frontend(1)
    try:
        late.spawn()
        wait_for(lambda: probe(f"http://{late.address}/health/ready") == "503 not_ready", LIMIT_S, "no answer")
        wait_for(lambda: "etcd at" in views(ask(late.address))[0]["reason"], LIMIT_S, "no reason")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            assert_answers(late, question)
        cluster.etcd.start()
        wait_for(lambda: ask(late.address)["status"] == "ready", LIMIT_S, "not ready")
        assert_answers(late, question)
    finally:
        late.stop()


def publishing(cluster):
    """Return the launch's workers that are heard, by its own report: it reads their metrics now and then."""
    workers = cluster.reports()[0].get("workers", {"no answer": {"publishes": True}})
    return {name for name, worker in workers.items() if worker["publishes"]}


def test_while_nats_is_gone_the_last_view_of_blocks_and_load_serves(cluster, question):
    cluster.nats.kill()
    until(cluster, lambda report: report["status"] == "degraded")
    wait_for(lambda: metric(cluster, "bireme_kv_publisher_up")[0] == {0.0}, LIMIT_S, "no metric tells")
    wait_for(lambda: told(cluster) == OLD, LIMIT_S, "somebody does not tell")
    wait_for(lambda: publishing(cluster) == set(), LIMIT_S, "the launch takes a worker for one that is heard")
    assert "NATS" in cluster.reports()[1]["routing"][ONE.served_name]
    assert_served(cluster, question)
    cluster.nats.start()


STRANGERS = {
    "model": ({"model": "other", "revision": ""}, "it serves other as mocker-disagg, this recipe tiny-llama"),
    "text": ({"text_revision": "another"}, "makes other prompts than tiny-llama here"),
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
        wait_for(lambda: told(cluster) == OLD, LIMIT_S, "somebody does not tell")
        assert_served(cluster, question)
        store.withdraw()


DEATHS = {
    "prefill.engine": OLD,
    "decode.engine": ("200", "503 not_ready", "503 not_ready"),
    "server": ("nobody", "503 not_ready", "503 not_ready"),
}


@pytest.mark.parametrize(
    "role",
    [role if role != "server" else pytest.param(role, marks=pytest.mark.soak) for role in DEATHS],  # it starts anew
)
def test_each_probe_tells_of_a_process_that_has_died(cluster, question, role):
    launch, victims, seen = cluster.launches["a"], [], []

    def has_been_told():
        pid = launch.roles().get(role)
        if pid not in (None, *victims) and (not victims or role != "server"):  # an engine is back at once
            victims.append(pid)
            send_signal(pid, signal.SIGKILL)
        seen.append(told(cluster))
        return all(any(said[way] == expected for said in seen) for way, expected in enumerate(DEATHS[role]))

    wait_for(has_been_told, LIMIT_S, "somebody does not tell")
    wait_for(lambda: told(cluster) == WELL, LIMIT_S, "it does not come back")
    assert launch.roles()[role] not in victims
    assert_served(cluster, question)


def test_each_probe_tells_of_a_stub_that_has_died(cluster):
    launch, (triton, own, frontend) = cluster.launches["a"], probes(cluster)
    os.kill(launch.pid, signal.SIGSTOP)  # it would have replaced the stub before it is asked
    try:
        send_signal(launch.roles()["prefill.stub"], signal.SIGKILL)
        wait_for(lambda: probe(frontend) == "200 degraded", LIMIT_S, "the frontend does not tell")
        assert probe(triton) == "200"
    finally:
        os.kill(launch.pid, signal.SIGCONT)
    wait_for(lambda: probe(own) == "200 degraded", LIMIT_S, "the launch does not tell")


def test_the_metric_of_an_engine_that_is_down_is_zero(cluster):
    send_signal(cluster.launches["a"].roles()["prefill.engine"], signal.SIGKILL)
    wait_for(lambda: metric(cluster, "bireme_engine_up")[0] == {0.0, 1.0}, LIMIT_S, "the metric does not tell")
    wait_for(lambda: metric(cluster, "bireme_engine_up")[0] == {1.0}, LIMIT_S, "it is not back")


DRAINS = {"prefill": WELL, "decode": ("200", "200 ready", "503 not_ready")}


@pytest.mark.parametrize("worker", DRAINS)
def test_a_worker_that_drains_is_in_order_unless_it_is_the_last_that_can_decode(cluster, question, worker):
    folder = f"--run-folder={cluster.launches['a'].run_folder()}"
    wait_for(lambda: drain.main([worker, folder]) == 0, LIMIT_S, "its engine, killed before, does not come back")
    wait_for(lambda: worker_states(cluster).get(worker) == "draining", LIMIT_S, "the frontend does not tell")
    wait_for(lambda: told(cluster) == DRAINS[worker], LIMIT_S, "somebody does not tell")
    assert drain.main([worker, "--undo", folder]) == 0
    wait_for(lambda: told(cluster) == WELL, LIMIT_S, "it takes no requests again")
    assert_served(cluster, question)


def worker_states(cluster):
    return {name.partition("@")[0]: state for name, state in cluster.frontends[0].ready_workers().items()}


def test_a_server_that_ends_in_good_order_says_so_while_its_last_stream_runs(cluster, question):  # the last: it ends
    launch, frontend = cluster.launches["a"], cluster.frontends[0]
    asked = {"model": ONE.served_name, "prompt": question.message, "max_tokens": 200, "ignore_eos": True}
    running = threading.Thread(target=post, args=(f"http://{frontend.address}/v1/completions", asked))
    running.start()
    wait_for(lambda: 1.0 in metric(cluster, "bireme_requests_running")[0], LIMIT_S, "no request runs")
    send_signal(launch.pid, signal.SIGTERM)
    wait_for(lambda: told(cluster) == ("200", "503 stopping", "503 not_ready"), LIMIT_S, "it does not tell")
    running.join()
    assert launch.wait(STOP_S) == 0
    wait_for(lambda: told(cluster) == ("nobody", "nobody", "503 not_ready"), LIMIT_S, "somebody does not tell")
