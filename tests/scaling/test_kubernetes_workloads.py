"""A deployment in Kubernetes, scaled through an API server over https, as its workloads and pods say."""

import http.server

import pytest

from bireme.errors import BiremeError, ConfigError
from bireme.launch.health_server import SmallHttpServer
from bireme.scaling.connector import AGGREGATED
from bireme.scaling.kubernetes_workloads import KubernetesTarget, KubernetesWorkloads
from tests.discovery.cluster_api import NAMESPACE, endpoint, endpoint_slice
from tests.scaling.scale_api import ScaleApi

NAME = "pair"  # the slices' Service is pair-workers


class PodPage(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(b'bireme_engine_up{worker="decode"} 1\n')

    def log_message(self, *_):
        pass


@pytest.fixture
def api(tmp_path, monkeypatch):
    made = ScaleApi(tmp_path)
    made.start()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    made.add("pair-prefill", 2)
    made.add("pair-decode", 1)
    yield made
    made.stop()


@pytest.fixture
def pod():
    server = SmallHttpServer("127.0.0.1", 0, PodPage)
    server.start("pod")
    yield server
    server.stop()


def workloads(api, pod=None):
    port = pod.port if pod is not None else 1
    return KubernetesWorkloads(
        KubernetesTarget(name=NAME, service_account=str(api.account), metrics_port=port, openai_port=1)
    )


def test_sizes_are_what_is_wanted_what_is_ready_and_what_still_ends(api):
    api.add("pair-prefill", 3, readyReplicas=1)
    api.add("pair-decode", 1, replicas=3, readyReplicas=3, terminatingReplicas=1)
    sizes = workloads(api).sizes()
    assert (sizes["prefill"].num_ready, sizes["prefill"].num_starting, sizes["prefill"].num_ending) == (1, 2, 0)
    assert (sizes["decode"].num_ready, sizes["decode"].num_starting, sizes["decode"].num_ending) == (1, 0, 3)


def test_scale_subresources_are_patched_with_the_version_that_was_seen(api):
    done = workloads(api).scale({"prefill": 4, "decode": 1})
    assert done == ["pair-prefill 2 -> 4 replicas"]
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/pair-prefill/scale"
    assert api.patches == [(path, {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 4}})]
    assert (api.replicas("pair-prefill"), api.replicas("pair-decode")) == (4, 1)


def test_an_engine_over_several_nodes_is_a_leader_worker_set(api):
    del api.workloads["deployments", "pair-decode"]
    api.add("pair-decode", 1, "leaderworkersets")
    connector = workloads(api)
    assert connector.sizes()["decode"].num_ready == 1
    connector.scale({"decode": 2})
    assert api.replicas("pair-decode", "leaderworkersets") == 2


def test_what_another_autoscaler_has_changed_meanwhile_is_not_undone(api):
    connector, answer = workloads(api), api.answer

    def raced(method, path, body):
        found = answer(method, path, body)
        if method == "GET" and path.endswith("/scale"):
            api.workloads["deployments", "pair-prefill"] |= {"metadata": {"resourceVersion": "8"}}
        return found

    api.answer = raced
    with pytest.raises(BiremeError, match="pair-prefill: it was changed meanwhile; is there an autoscaler, too"):
        connector.scale({"prefill": 4})
    assert api.replicas("pair-prefill") == 2


def test_what_is_refused_names_the_right_that_is_missing(api):
    api.forbidden = {"PATCH"}
    with pytest.raises(BiremeError, match=r"403 .* is forbidden; give the planner's service account patch of /apis/"):
        workloads(api).scale({"prefill": 4})
    api.rotate("second", is_mounted=False)
    with pytest.raises(BiremeError, match="401"):
        workloads(api).sizes()


def test_a_workload_that_is_not_there_is_named(api):
    del api.workloads["deployments", "pair-decode"]
    with pytest.raises(BiremeError, match=f"{NAMESPACE}/pair-decode: no such Deployment or LeaderWorkerSet"):
        workloads(api).sizes()


def test_an_api_server_that_is_gone_is_told(api):
    connector = workloads(api)
    connector.sizes()
    api.stop()
    with pytest.raises(BiremeError, match="API server at 127.0.0.1"):
        connector.sizes()
    api.start_again()
    assert connector.sizes()["prefill"].num_ready == 2


def test_pages_are_those_of_all_pods_but_of_such_as_start_or_end(api, pod):
    api.put(endpoint_slice("pair-a", 8003, endpoint("127.0.0.1", "a")))
    connector = workloads(api, pod)
    (page,) = connector.pages()
    assert page.source == "uid-a" and "bireme_engine_up" in page.text
    api.put(endpoint_slice("pair-b", 8003, endpoint("127.0.0.2", "b")))
    with pytest.raises(BiremeError, match="pods 127.0.0.2 tell no metrics"):
        connector.pages()
    api.add("pair-decode", 2, readyReplicas=1)
    assert [page.source for page in connector.pages()] == ["uid-a"]


def test_outside_of_a_cluster_it_is_refused(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="run the planner in a pod"):
        KubernetesWorkloads(KubernetesTarget(name=NAME))


def test_workers_that_compute_prompts_as_well_are_one_workload(api):
    del api.workloads["deployments", "pair-prefill"]
    target = KubernetesTarget(name=NAME, service_account=str(api.account), metrics_port=1, openai_port=1)
    connector = KubernetesWorkloads(target, AGGREGATED)
    sizes = connector.sizes()
    assert (sizes["prefill"].num_workers, sizes["decode"].num_workers) == (0, 1)
    assert connector.scale({"prefill": 0, "decode": 3}) == ["pair-decode 1 -> 3 replicas"]
