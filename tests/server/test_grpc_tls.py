"""A real tritonserver whose gRPC port asks for certificates: its own pipelines, the frontend and clients have one."""

import contextlib
import http.client
import json
import subprocess
import time
import urllib.request

import pytest
import yaml
from tritonclient import grpc as grpcclient
from tritonclient.utils import InferenceServerException

from bireme.errors import ConfigError
from bireme.launch.preflight import check_grpc_tls
from bireme.recipe_files import load_recipe
from bireme.workers.base import UnreachableError
from bireme.workers.grpc import GrpcChannel
from bireme.workers.grpc_tls import GrpcTls
from tests.server.openai_served import chat, five_ports, served

pytestmark = pytest.mark.server
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(folder, *arguments):
    try:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"openssl can't make certificates here: {error}")


def write_authority(folder, name):
    """Write an authority's certificate, and a pair that it has signed for host `name`."""
    folder.mkdir()
    openssl(
        folder, "req", "-x509", *NEW_KEY, "-days", "2", "-subj", "/CN=authority", "-out", "ca.crt", "-keyout", "ca.key"
    )
    openssl(folder, "req", *NEW_KEY, "-subj", f"/CN={name}", "-out", "request", "-keyout", "own.key")
    (folder / "names").write_text(f"subjectAltName=DNS:{name}")
    signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl(folder, "x509", "-req", "-in", "request", *signing, "-out", "own.crt")
    return folder


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return write_authority(tmp_path_factory.mktemp("tls") / "first", "bireme.test")


def write_recipe(folder, **files):
    """Write a recipe of the mocker, with the certificates of its folder unless other files are named."""
    tls = {"certificate": "own.crt", "key": "own.key", "authority": "ca.crt", "server_name": "bireme.test", **files}
    worker = {"engine": "mocker", "engine_config": {"cache_transceiver_config": {"backend": "DEFAULT"}}}
    workers = {"decode": worker, "prefill": worker}
    tree = {"model": "models/tiny-llama", "workers": workers, "router": {"transfer_ms": 0}, "grpc_tls": tls}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return str(folder)


@pytest.fixture(scope="module")
def deployment(authority, sample_model, tmp_path_factory):
    """With canaries: they go through prefill, transfer and decode."""
    sample_model("llama")
    ports = five_ports()
    log = tmp_path_factory.mktemp("log") / "log"
    with served(write_recipe(authority), log, "--canary-interval=1", ports=ports) as running:
        yield running, ports


def grpc_client(ports, folder, **more):
    """`more`: other files than those of the folder; None: without."""
    files = {"root_certificates": "ca.crt", "private_key": "own.key", "certificate_chain": "own.crt"} | more
    paths = {name: str(folder / file) if file else None for name, file in files.items()}
    named = [("grpc.ssl_target_name_override", "bireme.test")]
    return grpcclient.InferenceServerClient(f"127.0.0.1:{ports['grpc']}", ssl=True, channel_args=named, **paths)


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def readiness(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/health/ready")
        return json.load(connection.getresponse())


def test_the_frontend_reaches_the_workers(deployment, authority):
    answer = post(f"{deployment[0].url}/v1/chat/completions", chat("hi", max_tokens=5) | {"model": authority.name})
    assert answer["usage"]["completion_tokens"] == 5


def test_pipelines_reach_the_workers_of_their_own_server(deployment):
    url = f"http://127.0.0.1:{deployment[1]['http']}/v2/models/generate/generate"
    answer = post(url, {"text_input": "One day", "max_tokens": 5})
    assert answer["text_output"]


def test_the_port_counts_as_open(deployment):
    """A moment after the frontend's word at the latest, when each port and worker was looked at."""
    deadline = time.monotonic() + 30
    while (report := readiness(deployment[1]["health"]))["status"] != "ready" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert report["status"] == "ready" and report["doors"]["grpc"]["ready"], report


def test_a_client_with_a_certificate_is_served_and_others_are_not(deployment, authority, tmp_path):
    ports, stranger = deployment[1], write_authority(tmp_path / "stranger", "bireme.test")
    with grpc_client(ports, authority) as client:
        assert client.is_server_live()
    foreign = {"private_key": str(stranger / "own.key"), "certificate_chain": str(stranger / "own.crt")}
    for files in ({"private_key": None, "certificate_chain": None}, foreign):
        with grpc_client(ports, authority, **files) as client, pytest.raises(InferenceServerException):
            client.is_server_live(client_timeout=5)
    with (
        grpcclient.InferenceServerClient(f"127.0.0.1:{ports['grpc']}") as client,
        pytest.raises(InferenceServerException),
    ):
        client.is_server_live(client_timeout=5)


async def test_a_frontend_of_another_authority_is_told_what_has_to_fit(deployment, tmp_path):
    recipe = load_recipe(write_recipe(write_authority(tmp_path / "stranger", "bireme.test")))
    channel = GrpcChannel(f"127.0.0.1:{deployment[1]['grpc']}", GrpcTls.of(recipe))
    with pytest.raises(UnreachableError, match="grpc_tls"):
        await channel.is_loaded("decode")
    await channel.close()


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_a_file_that_cannot_be_used_is_named_before_anything_starts(authority, tmp_path, name):
    files = {"certificate": authority / "own.crt", "key": authority / "own.key", "authority": authority / "ca.crt"}
    files = {key: str(path) for key, path in files.items()}
    (tmp_path / "broken").write_text("no certificate")
    (problem,) = check_grpc_tls(load_recipe(write_recipe(tmp_path, **files | {name: "broken"})))
    assert problem.startswith("grpc_tls.") and str(tmp_path / "broken") in problem
    with pytest.raises(ConfigError, match=f"grpc_tls.{name}: missing"):
        load_recipe(write_recipe(tmp_path, **files | {name: ""}))
