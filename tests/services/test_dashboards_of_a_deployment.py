"""Every panel's query has a finite answer where Prometheus scrapes a real deployment under a little of everything."""

import contextlib
import math

import pytest

from tests.server.watch import PATIENCE
from tests.services.dashboard_load import KEY, deployment, until
from tests.services.dashboard_queries import queries
from tests.services.prometheus import Prometheus

WINDOW = "10m"  # the whole load, on a slow machine, too
LATE_S = 5.0  # two tokens take milliseconds, on a machine that does nothing else
# What a query without an answer here must name: series that this deployment can't have, and why.
ABSENT = {
    "trtllm_": "TensorRT-LLM's own",
    "bireme_video_": "nothing here makes videos",
    "bireme_kv_staging_bytes": "KV that is on no GPU is not staged",
    "bireme_mirror_": "no request is mirrored",
    "bireme_routed_generations_total": "one generation serves alone",
    "bireme_weights_engines": "the memory service is off",
    "bireme_prompt_attention": "engines on a CPU have one attention",
    "bireme_planner_": "no planner runs",
    "_draft_": "no engine drafts",
    "bireme_head_imports_total": "nor has one a head",
}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("panels")
    with deployment(folder) as serving, Prometheus(folder, serving.targets, key=KEY) as prometheus:
        until(lambda: len(prometheus.ask("up == 1")) == 2, "a target is not scraped")
        serving.load()
        until(lambda: prometheus.ask("bireme_batch_lines_total > 0"), "the batch's line is not counted")
        until(lambda: prometheus.ask("bireme_canaries_total > 0"), "no canary is counted")
        until(lambda: prometheus.ask("bireme_migrations_total > 0"), "no migration is counted")
        prometheus.serving = serving
        yield prometheus


def asked():
    """Return title and expression of each query; what looks back a minute looks back over the whole load, too."""
    return [(title, expression.replace("[1m]", f"[{WINDOW}]")) for title, expression in queries(WINDOW)]


def is_absent(expression):
    return any(name in expression for name in ABSENT)


def unanswered(running):
    return {title for title, query in asked() if not is_absent(query) and not running.ask(query)}


def test_each_panel_has_finite_values(running):
    with contextlib.suppress(AssertionError):  # a rate of what has begun just now takes two scrapes
        until(lambda: not unanswered(running), "what has no answer is told below")
    assert unanswered(running) == set()
    values = [(title, value) for title, query in asked() for _, value in running.ask(query)]
    assert [one for one in values if not math.isfinite(one[1])] == []


def test_what_is_said_to_be_absent_is(running):
    present = [title for title, query in asked() if is_absent(query) and running.ask(query)]
    assert present == []
    used = [name for name in ABSENT if any(name in query for _, query in asked())]
    assert used == list(ABSENT)


def test_what_was_asked_for_has_been_counted(running):
    for counted in (
        'bireme_requests_total{worker="frontend", outcome="INVALID_ARGUMENT"}',
        'bireme_cancellations_total{worker=~"decode.*"}',
        'bireme_rate_limited_total{key="limited"}',
        'bireme_kv_onboarded_blocks_total{tier=~"host|disk"}',
        "bireme_embedding_cache_hits_total",
        'bireme_engine_restarts_total{cause="exit"}',
        "bireme_traceparents_ignored_total",
    ):
        until(lambda query=counted: running.ask(f"{query} > 0"), f"{counted} is 0")


def test_pages_that_are_asked_for_100_times_a_second_hold_nothing_up(running):
    serving = running.serving
    late_s = LATE_S + PATIENCE * max(serving.answer_s() for _ in range(5))
    with serving.asking_for_pages(times_a_second=100) as statuses:
        for _ in range(10):
            assert serving.answer_s() < late_s
        until(lambda: len(statuses) >= 100, "the pages are not answered")
    assert set(statuses) == {200}
