"""serve.py's options and exit codes, without a server."""

import os
import socket
import stat

import pytest

from bireme.errors import ConfigError
from bireme.launch import free_port
from bireme.launch.deployment import advertised_address, deployment_key
from bireme.launch.run_folder import RunFolder, default_base
from bireme.recipe_files import load_recipe
from tools import serve

PORTS = ("http", "grpc", "metrics", "health", "openai")


def test_a_recipe_and_a_model_together_are_refused(capsys):
    with pytest.raises(SystemExit):
        serve.parse(["recipes/tiny", "--model", "x"])
    assert "not both" in capsys.readouterr().err


def test_options_become_settings(tmp_path):
    (tmp_path / "model").mkdir()
    model = str(tmp_path / "model")
    options = serve.parse(["--model", model, "--disaggregated", "--http-port", "23390", "--openai-port", "9000"])
    run_folder = RunFolder(tmp_path / "base")
    settings = serve.settings_of(options, run_folder)
    assert settings.ports.http == 23390 and set(settings.recipe.workers) == {"prefill", "decode"}
    assert settings.frontend is not None and settings.frontend.grpc == "127.0.0.1:8001"
    run_folder.clear()  # for another life of the server, which needs the recipe as well
    assert load_recipe(settings.recipe.folder) == settings.recipe
    run_folder.remove()


def test_a_generation_begins_with_its_weight(tmp_path):
    given = [], ["--generation", "2", "--weight", "0"]
    facts = [serve.settings_of(serve.parse(["recipes/mocker", *more]), tmp_path).facts for more in given]
    assert [(one.generation, one.weight) for one in facts] == [(0, 1.0), (2, 0.0)]


@pytest.mark.parametrize("more", [["--generation", "-1"], ["--weight", "2"], ["--weight", "nan"]])
def test_a_generation_or_weight_that_is_none_is_refused(tmp_path, more):
    with pytest.raises(ConfigError, match=f"{more[0]}: {more[1]}; 0 to "):
        serve.settings_of(serve.parse(["recipes/mocker", *more]), tmp_path)


def test_client_shared_memory_is_off_unless_asked_for(tmp_path):
    settings = [
        serve.settings_of(serve.parse(["recipes/mocker", *more]), tmp_path) for more in ([], ["--allow-client-shm"])
    ]
    assert [one.allow_client_shm for one in settings] == [False, True]


def test_a_check_says_all_that_is_missing_and_starts_nothing(tmp_path, capsys):
    before = own_folders()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["recipes/mocker", "--check", "--http-port", str(port), "--openai-port", "0"]) == serve.WRONG
    assert f"port {port} of 127.0.0.1 is taken" in capsys.readouterr().err and own_folders() == before


def test_a_check_reads_the_key_file(tmp_path, capsys):
    ports = [word for name in PORTS for word in (f"--{name}-port", str(free_port()))]
    (tmp_path / "keys.yaml").write_text("keys: []")
    wrong = ["--api-keys", str(tmp_path / "keys.yaml")]
    assert serve.main(["recipes/mocker", "--check", *ports]) == 0
    assert serve.main(["recipes/mocker", "--check", *ports, *wrong]) == serve.WRONG
    assert "keys.yaml" in capsys.readouterr().err


def test_an_unknown_recipe_ends_with_code_2_and_names_the_nearest(capsys):
    assert serve.main(["recipes/tinny"]) == serve.WRONG
    assert "did you mean recipes/tiny" in capsys.readouterr().err


def test_a_broken_override_ends_with_code_2_and_leaves_no_folder(capsys):
    before = own_folders()  # of servers that other tests of this process still share
    assert serve.main(["recipes/mocker", "--override", "{"]) == serve.WRONG
    assert "not valid JSON" in capsys.readouterr().err
    assert own_folders() == before


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--openai-port", "70000", "--openai-port 70000 is not a port"),
        ("--openai-port", "-1", "--openai-port -1 is not a port"),
        ("--health-port", "70000", "--health-port 70000 is not a port"),
        ("--health-port", "-1", "--health-port -1 is not a port"),
        ("--metrics-port", "0", "--metrics-port 0 is not a port"),
        ("--openai-port", "8000", "port 8000 is given to more than one"),
        ("--triton-host", "203.0.113.5", "--triton-host 203.0.113.5: Cannot assign"),
        ("--health-host", "203.0.113.5", "--health-host 203.0.113.5: Cannot assign"),
        ("--grpc-host", "203.0.113.0/24", "no address in 203.0.113.0/24"),
        ("--metrics-host", "nosuchhost.invalid", "--metrics-host nosuchhost.invalid: "),
    ],
)
def test_a_host_or_port_that_can_t_be_listened_on_ends_with_code_2_and_leaves_no_folder(option, value, text, capsys):
    before = own_folders()
    assert serve.main(["recipes/mocker", option, value]) == serve.WRONG
    assert text in capsys.readouterr().err
    assert own_folders() == before


def test_a_port_of_the_environment_that_is_no_number_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("BIREME_OPENAI_PORT", "many")
    with pytest.raises(SystemExit):
        serve.parse([])
    assert "--openai-port: invalid int value: 'many'" in capsys.readouterr().err


def own_folders():
    return set(default_base().glob(f"{os.getpid()}-*"))


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:8001"),
        ("node7", "node7:8001"),
        ("node7:9", "node7:9"),
        ("::1", "[::1]:8001"),
        ("[::1]:9", "[::1]:9"),
    ],
)
def test_other_servers_are_told_the_address_that_is_given(host, address):
    assert advertised_address(host, 8001) == address


def test_an_address_that_means_any_becomes_the_host_s_name():
    assert advertised_address("0.0.0.0", 8001) == f"{socket.gethostname()}:8001"


def test_servers_that_share_a_folder_share_the_key_in_it(tmp_path, monkeypatch):
    monkeypatch.delenv("BIREME_KEY", raising=False)
    options = serve.parse(["recipes/mocker", "--discovery", str(tmp_path / "shared")])
    recipes = [serve.settings_of(options, tmp_path).recipe for _ in range(2)]
    assert deployment_key(recipes[0]) == deployment_key(recipes[1])
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o700


def test_servers_that_share_etcd_are_given_one_key(tmp_path, monkeypatch):
    monkeypatch.delenv("BIREME_KEY", raising=False)
    recipe = serve.settings_of(serve.parse(["recipes/mocker", "--discovery", "etcd://127.0.0.1"]), tmp_path).recipe
    with pytest.raises(ConfigError, match="BIREME_KEY: not set; servers and frontends that share discovery"):
        deployment_key(recipe)


def test_events_for_other_hosts_need_a_key_that_those_can_have(tmp_path, monkeypatch):
    monkeypatch.delenv("BIREME_KEY", raising=False)
    recipes = [
        serve.settings_of(serve.parse(["recipes/mocker", "--set", f"kv_events.host={host}"]), tmp_path).recipe
        for host in ("127.0.0.1", "10.0.0.1")
    ]
    assert len(deployment_key(recipes[0])) == 64
    with pytest.raises(ConfigError, match="BIREME_KEY: not set; kv_events.host 10.0.0.1 is for readers on other hosts"):
        deployment_key(recipes[1])


def test_a_stage_is_left_to_others_only_where_there_can_be_others(tmp_path):
    arguments = ["recipes/mocker-disagg", "--set", "workers.decode.replicas=0"]
    with pytest.raises(
        ConfigError, match=r"workers\.decode\.replicas: 0; 1 to 64; 0 leaves the stage to other servers"
    ):
        serve.settings_of(serve.parse(arguments), tmp_path)
    settings = serve.settings_of(serve.parse([*arguments, "--discovery", str(tmp_path)]), tmp_path)
    assert settings.recipe.replicas("decode") == () and "decode" in settings.recipe.workers
