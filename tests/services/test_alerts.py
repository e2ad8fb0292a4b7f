"""Each alert of docker/prometheus, fired by a real fault and ended with it: from the metric to the webhook's receiver.

Prometheus and alertmanager are real; each `for` is a second and each range ten. Alerts end while later tests run, and
the last test looks whether all have.
"""

import os
import re
import signal
import time

import pytest
import yaml

from tests.services.prometheus import FILES
from tests.services.watched_deployment import Watched, until

RULES = {rule["alert"]: rule for rule in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]}


@pytest.fixture(scope="module")
def watched(sample_model, tmp_path_factory):
    with Watched(tmp_path_factory.mktemp("watched"), sample_model("llama")) as running:
        for _ in range(3):
            assert running.ask() == 200
        yield running


def test_nothing_fires_while_all_is_well(watched):
    until(lambda: len(watched.prometheus.ask('up{job="bireme"} == 1')) == 2, "a target is not scraped")
    until(lambda: watched.prometheus.ask("bireme_kv_publisher_up == 1"), "no publisher")
    assert watched.receiver.told == []


def test_etcd_that_is_gone(watched):
    watched.etcd.kill()
    for worker in ("frontend", "generate"):
        told = watched.fires("DiscoveryStale", worker=worker, model="mocker-disagg")
        assert told["annotations"]["summary"].startswith(f"{worker} can't reach where the workers of mocker-disagg are")
    watched.etcd.start()


def test_nats_that_is_gone_so_that_routers_know_old_blocks_and_events_are_lost(watched):
    prompt = watched.new_prompt()
    watched.ask(prompt)
    watched.nats.kill()
    for worker in ("prefill", "decode"):
        watched.fires("KvEventsUnsent", worker=worker)

    def turn_over():
        for _ in range(8):
            watched.ask(max_tokens=1)
        watched.ask(prompt, max_tokens=1)

    watched.fires("CacheHitsMispredicted", turn_over, worker="frontend")
    watched.nats.start()
    watched.fires("KvEventsLost", worker="prefill")


def test_an_engine_that_dies_again_and_again_with_what_it_has_leased(watched):
    def claim_too_late():
        asked = {"input_ids": watched.new_prompt(), "max_tokens": 5}
        params = watched.client.infer("prefill", **asked)["disaggregated_params"]
        watched.kill_engine("prefill")
        with pytest.raises(Exception, match="prefill again"):
            watched.client.generate("decode", disaggregated_params=params, **asked)

    watched.fires("KvTransfersFail", claim_too_late, worker="decode")
    told = watched.fires("EngineRestarts", lambda: watched.kill_engine("prefill"), worker="prefill")
    assert re.fullmatch(r"prefill has been started again \d times in 10 minutes", told["annotations"]["summary"])


def test_a_collector_that_refuses_spans(watched):
    watched.collector.status = 400
    watched.fires("TracesDropped", watched.ask, reason="not_taken")
    watched.collector.status = 200


def test_decode_that_never_fetches(watched):
    def leave_leased():
        watched.client.infer("prefill", input_ids=watched.new_prompt(), max_tokens=5)

    watched.fires("KvLeasesExpire", leave_leased, worker="prefill")


def test_requests_that_fill_the_pool_and_those_that_wait_for_them(watched):
    first, second = watched.begin(max_tokens=600), watched.begin(max_tokens=600)
    for one in (first, second):
        one.wait_for_token()
    third, began = watched.begin(max_tokens=600), time.monotonic()
    watched.fires("RequestsQueue", worker="decode")
    watched.fires("TokensLate", worker="decode")
    until(lambda: time.monotonic() - began > 6, "the clock stands still")  # 5 s without a token are late
    first.leave()
    third.wait_for_token()
    third.leave()
    watched.fires("FirstTokensLate", worker="frontend")
    second.leave()


def test_an_engine_that_cannot_start_again(watched):
    with watched.model_gone():
        os.kill(watched.launch.roles()["decode.engine"], signal.SIGKILL)
        watched.fires("EngineDown", worker="decode")
        watched.fires("FrontendNotReady", worker="frontend")
        watched.fires("RequestsFail", lambda: watched.ask(), worker="frontend")


def test_a_frontend_that_stands_still(watched):
    with watched.stopped("frontend"):
        watched.fires("TargetDown", instance=watched.launch.addresses["openai"])


def test_every_alert_has_fired_and_ended(watched):
    assert {one["labels"]["alertname"] for one in watched.receiver.told} == RULES.keys()
    until(lambda: not watched.receiver.firing(), f"still firing: {watched.receiver.firing()}")
    assert watched.ask() == 200
