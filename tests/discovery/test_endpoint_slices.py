"""Pods from EndpointSlices: a list, a watch that goes on from it, and what ends either."""

import threading

import pytest

from bireme.discovery.endpoint_slices import ApiError, EndpointSlices, Pod
from bireme.errors import ConfigError
from bireme.settings import DiscoveryConfig
from tests.discovery.cluster_api import NAMESPACE, SERVICE, cluster_api, endpoint, endpoint_slice


@pytest.fixture
def api(tmp_path, monkeypatch):
    with cluster_api(tmp_path) as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        running.put(endpoint_slice("pair-1", 8003, endpoint("10.0.0.1", "a")))
        yield running


@pytest.fixture
def slices(api):
    made = EndpointSlices(settings(api))
    yield made
    made.close()


def settings(api, service=SERVICE):
    return DiscoveryConfig(backend="kubernetes", service=service, service_account=str(api.account))


def addresses(pods):
    return {name: pod.addresses for name, pod in pods.items()}


def pods_of(slices):
    """Skip what the list says: what a watch begins with is the same."""
    following = slices.follow()
    next(following)
    return following


def test_a_watch_goes_on_from_the_list_and_tells_each_change(api, slices):
    following = pods_of(slices)
    assert next(following) == {"uid-a": Pod("uid-a", ("10.0.0.1",), 8003)}
    api.put(endpoint_slice("pair-1", 8003, endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b")))
    assert addresses(next(following)) == {"uid-a": ("10.0.0.1",), "uid-b": ("10.0.0.2",)}
    api.put(endpoint_slice("pair-1", 8003))
    assert next(following) == {}
    (is_watch, listed), (_, watched) = api.asked
    assert not is_watch and listed["limit"] == "500"
    assert watched["resourceVersion"] == "101" and watched["allowWatchBookmarks"] == "true"


def test_a_service_may_have_many_slices_and_each_its_port(api, slices):
    following = pods_of(slices)
    api.put(endpoint_slice("pair-2", 9003, endpoint("10.0.0.2", "b")))
    next(following)
    assert {pod.port for pod in next(following).values()} == {8003, 9003}
    api.delete("pair-1")
    assert addresses(next(following)) == {"uid-b": ("10.0.0.2",)}


def test_a_pod_that_is_not_ready_or_ends_is_asked_as_well(api, slices):
    """It tells itself which of its workers take requests."""
    starting, ending = endpoint("10.0.0.2", "b", is_ready=False), endpoint("10.0.0.3", "c", is_terminating=True)
    api.put(endpoint_slice("pair-1", 8003, starting, ending))
    assert next(slices.follow()).keys() == {"uid-b", "uid-c"}


def test_a_pod_of_two_families_is_one_with_two_addresses(api, slices):
    api.put(endpoint_slice("pair-6", 8003, endpoint("fd00::1", "a"), family="IPv6"))
    api.put(endpoint_slice("pair-x", 8003, endpoint("a.example", "x"), family="FQDN"))
    assert addresses(next(slices.follow())) == {"uid-a": ("10.0.0.1", "fd00::1")}


def test_a_pod_that_is_in_two_slices_for_a_moment_is_one(api, slices):
    api.put(endpoint_slice("pair-2", 8003, endpoint("10.0.0.1", "a")))
    assert addresses(next(slices.follow())) == {"uid-a": ("10.0.0.1",)}


def test_a_long_list_comes_in_parts(api, slices):
    for number in range(2, 6):
        api.put(endpoint_slice(f"pair-{number}", 8003, endpoint(f"10.0.0.{number}")))
    api.part = 2
    assert len(next(slices.follow())) == 5
    assert [query.get("continue") for _, query in api.asked] == [None, "2", "4"]


def test_a_watch_that_ends_is_begun_again_where_it_was(api, slices):
    following = pods_of(slices)
    next(following)
    version = api.bookmark()
    api.end_watches()
    next(following)
    assert api.asked[-1][1]["resourceVersion"] == str(version)
    assert [is_watch for is_watch, _ in api.asked] == [False, True, True]


def test_a_version_that_is_too_old_is_listed_anew(api, slices):
    following = pods_of(slices)
    next(following)
    api.put(endpoint_slice("pair-1", 8003, endpoint("10.0.0.9", "z")))
    api.forget()
    while "uid-z" not in next(following):
        pass
    next(following)
    assert [is_watch for is_watch, _ in api.asked] == [False, True, False, True]


def test_a_token_that_was_rotated_is_read_again(api, slices):
    following = pods_of(slices)
    next(following)
    api.rotate("second", is_mounted=False)
    api.end_watches()
    with pytest.raises(ApiError, match="401 Unauthorized.*token is not taken"):
        next(following)
    api.rotate("second")
    assert next(slices.follow()).keys() == {"uid-a"}
    assert api.asked[-1][0]  # a watch: what is known stays known


@pytest.mark.parametrize(
    "code, headers, told, after_s",
    [
        (403, {}, "get, list and watch of endpointslices in llm", 0.0),
        (429, {"Retry-After": "3"}, "429 refused with 429", 3.0),
        (503, {}, "503", 0.0),
    ],
)
def test_a_refusal_says_why_and_what_helps(api, slices, code, headers, told, after_s):
    api.refusals.append((code, headers))
    with pytest.raises(ApiError, match=told) as raised:
        next(slices.follow())
    assert raised.value.retry_after_s == after_s
    assert next(slices.follow())


def test_a_service_that_is_not_there_is_named(api):
    with pytest.raises(ApiError, match=f"Service {NAMESPACE}/nowhere has no EndpointSlices"):
        next(EndpointSlices(settings(api, "nowhere")).follow())
    with pytest.raises(ApiError, match=f"Service other/{SERVICE} has no EndpointSlices"):
        next(EndpointSlices(settings(api, f"{SERVICE}.other")).follow())


def test_another_authority_s_server_is_not_asked(api, slices, tmp_path_factory):
    with cluster_api(tmp_path_factory.mktemp("other")) as other:
        (api.account / "ca.crt").write_bytes((other.account / "ca.crt").read_bytes())
        with pytest.raises(ApiError, match="certificate verify failed"):
            next(slices.follow())


def test_outside_of_a_pod_it_says_so(api, monkeypatch):
    (api.account / "namespace").unlink()
    with pytest.raises(ConfigError, match="namespace can't be read.*automountServiceAccountToken"):
        EndpointSlices(settings(api))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(ConfigError, match="this process runs in no pod"):
        EndpointSlices(settings(api))


def test_a_watch_that_is_silent_ends_at_once_when_it_is_closed(slices):
    following, ended = pods_of(slices), threading.Event()
    next(following)

    def wait():
        with pytest.raises(ApiError):
            next(following)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    slices.close()
    assert ended.wait(30)
