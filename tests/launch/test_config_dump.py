"""serve.py --dump-config-to: what the file holds and what it leaves out, without a server."""

import json
import os
import stat

import pytest
import yaml

from bireme import yaml_text
from bireme.config import CHECKOUT
from bireme.errors import ConfigError
from bireme.launch.config_dump import ConfigFile, describe
from bireme.launch.console import Console
from bireme.launch.deployment import Deployment
from bireme.launch.run_folder import RunFolder, default_base
from bireme.recipe_files import load_recipe, make_recipe
from tools import serve

BYTES = b"a key of 32 bytes, in hexadecimal"
RECIPES = sorted(path.parent.name for path in (CHECKOUT / "recipes").glob("*/recipe.yaml"))


@pytest.fixture
def dump(tmp_path, monkeypatch):
    """Return what a launch with these options writes when it begins."""
    monkeypatch.delenv("BIREME_OVERRIDE", raising=False)

    def dump(*arguments):
        options = serve.parse(arguments)
        run_folder = RunFolder(tmp_path / "base")
        deployment = Deployment(serve.settings_of(options, run_folder), Console("error"), run_folder)
        file = ConfigFile(str(tmp_path / "config.yaml"))
        file.write(describe(deployment, serve.given_by(options), "starting"))
        run_folder.remove()
        return yaml_text.read((tmp_path / "config.yaml").read_text())

    return dump


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_in_it_given_back_is_the_same(name, dump):
    found = dump(f"recipes/{name}", "--set", "limits.max_n=3")
    recipe = load_recipe(f"recipes/{name}", '{"limits": {"max_n": 3}}')
    assert load_recipe(f"recipes/{name}", json.dumps(found["recipe"])) == recipe
    assert make_recipe(found["recipe"], CHECKOUT / "recipes" / name) == recipe
    assert found["left_out"] == []


def test_each_value_says_where_it_came_from(dump, tmp_path):
    of_decode = {"engine_args": {"max_batch_size": 3}, "engine_config": {"max_seq_len": 512}}
    override = json.dumps({"workers": {"decode": of_decode}, "limits": {"max_n": 2, "max_tools": 4}})
    options = ["--set", "limits.max_n=3", "--discovery", str(tmp_path / "shared"), "--override", override]
    sources = dump("recipes/tiny", *options)["sources"]
    folder = CHECKOUT / "recipes" / "tiny"
    assert sources["model"] == f"{folder}/recipe.yaml:2"
    assert sources["workers.prefill.engine_config.max_batch_size"] == f"{folder}/engine.yaml:2"
    assert sources["workers.decode.engine_config.max_batch_size"] == "--override"
    assert sources["workers.decode.engine_config.max_seq_len"] == "--override"
    assert sources["workers.decode.engine_config.attn_backend"] == "default"
    assert (sources["limits.max_n"], sources["limits.max_tools"]) == ("--set", "--override")
    assert (sources["discovery.folder"], sources["discovery.lease_s"]) == ("--discovery", "default")


def test_an_engine_yaml_named_by_the_override_is_named_itself(dump):
    override = json.dumps({"workers": {"prefill": {"engine_config": "../tiny-agg/engine.yaml"}}})
    sources = dump("recipes/tiny", "--override", override)["sources"]
    place = sources["workers.prefill.engine_config.max_num_tokens"]
    assert "tiny-agg/engine.yaml:" in place
    assert sources["workers.prefill.engine_config.attn_backend"] == "default"


def test_variables_and_options_say_where_they_came_from(dump, monkeypatch):
    monkeypatch.setenv("BIREME_OVERRIDE", '{"limits": {"max_n": 2}}')
    monkeypatch.setenv("BIREME_OPENAI_PORT", "9100")
    found = dump("recipes/mocker", "--http-port", "8100")
    options, sources = found["options"], found["sources"]
    assert sources["limits.max_n"] == "BIREME_OVERRIDE" and found["recipe"]["limits"]["max_n"] == 2
    assert options["http_port"] == {"value": 8100, "source": "--http-port"}
    assert found["left_out"] == []
    assert options["openai_port"] == {"value": 9100, "source": "BIREME_OPENAI_PORT"}
    assert options["grpc_port"] == {"value": 8001, "source": "default"}
    assert found["ports"]["http"] == "127.0.0.1:8100" and found["ports"]["openai"] == "127.0.0.1:9100"


def test_a_launch_without_a_recipe_says_so(dump, tmp_path):
    (tmp_path / "model").mkdir()
    found = dump("--model", str(tmp_path / "model"), "--disaggregated")
    assert found["sources"]["model"] == found["sources"]["workers.prefill.engine"] == "--model"


def test_what_it_runs_on_is_told(dump):
    found = dump("recipes/tiny")
    assert {"bireme", "python", "packages"} <= found["versions"].keys()
    assert {"torch", "transformers", "msgspec"} <= found["versions"]["packages"].keys()
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_bytes"] > 1 << 28
    assert found["settled"]["workers"]["decode"]["num_threads"] >= 1


def test_gpus_are_told_as_the_driver_names_them(dump, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, GPU-1, 81559 MiB, 9.0, 570.1'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (gpu,) = dump("recipes/tiny")["machine"]["gpus"]
    assert (gpu["name"], gpu["memory.total"], gpu["driver_version"]) == ("NVIDIA H100 80GB HBM3", "81559 MiB", "570.1")


def test_no_secret_is_in_it(dump, monkeypatch, tmp_path):
    """One stands in every place that can have one, each with a name of its own."""
    monkeypatch.setenv("BIREME_KEY", BYTES.hex())
    for name in ("HF_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS", "MY_OWN", "BIREME_API_KEYS", "AWS_SECRET"):
        monkeypatch.setenv(name, f"planted-{name}")
    monkeypatch.setenv("HF_ENDPOINT", "https://user:planted-endpoint@hub")
    keys = tmp_path / "keys.yaml"
    keys.write_text("planted-file-" + 32 * "x")
    keys.chmod(0o600)
    worker = {
        "env": {"MY_OWN": "planted-env", "HF_TOKEN": "planted-hf", "NCCL_DEBUG": "INFO", "UCX_URL": "u://planted-u@h"},
        "engine": "trtllm",
        "model": "https://hub/model?token=planted-query",
        "engine_config": {
            "env_overrides": {"A_TOKEN": "planted-override"},
            "postprocess_tokenizer_dir": "s3://planted-user:x@bucket",
            "kv_connector_config": {"connector_module": "m", "api_key": "planted-connector", "apiKey": "planted-camel"},
            "tags": ["Bearer planted-bearer", "-----BEGIN PRIVATE KEY-----planted-pem"],
        },
    }
    override = {
        "workers": {"decode": worker},
        "kv_events": {
            "plane": "nats",
            "nats_url": "nats://user:planted-nats@host:4222",
            "nats_credentials": "planted-credentials",
        },
        "frontend": {"api_keys": "planted-no-such-file"},
        "chat": {"template_kwargs": {"greeting": "hello", "password": "planted-password", "pwd": [{"a": "planted"}]}},
        "video": {"public_url": "https://a:planted-video@host"},
        "grpc_tls": {"key": "planted-key", "certificate": "own.pem", "authority": "all.pem"},
    }
    found = dump(
        *("recipes/mocker", "--override", json.dumps(override), "--set", "sampling.token=planted-set"),
        *("--discovery", "etcd://user:planted-etcd@host:2379", "--advertise", "here:1"),
        *("--api-keys", str(keys), "--tls-key", "planted-tls"),
        *("--admin-key-file", str(keys), "--admin-port", "8005"),
        *("--tls-cert", "x", "--triton-arg=--http-restricted-api=health:key=planted-flag", "--triton-arg=planted-arg"),
    )
    text = json.dumps(found).replace(str(keys), "")
    assert "planted" not in text and BYTES.hex() not in text
    options = found["options"]
    assert options["api_keys"]["value"] == options["admin_key_file"]["value"] == str(keys)  # the name of a file is none
    assert found["ports"]["admin"] == "127.0.0.1:8005"
    assert found["recipe"]["workers"]["decode"]["env"] == {"NCCL_DEBUG": "INFO"}
    assert found["recipe"]["chat"]["template_kwargs"]["greeting"] == "hello"
    assert {"kv_events.nats_url", "grpc_tls.key", "workers.decode.env.HF_TOKEN"} <= set(found["left_out"])
    assert {"--tls-key", "--discovery", "BIREME_KEY"} <= set(found["left_out"])
    assert found["sources"]["kv_events.nats_url"] == "--override"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("config.txt", "End the name in"), ("missing/config.json", "No such file"), ("folder.json", "no regular file")],
)
def test_a_file_that_can_t_be_written_is_refused_before_anything_starts(name, reason, tmp_path, capsys):
    (tmp_path / "folder.json").mkdir()
    path = str(tmp_path / name)
    before = set(default_base().glob(f"{os.getpid()}-*"))
    assert serve.main(["recipes/mocker", "--dump-config-to", path]) == serve.WRONG
    error = capsys.readouterr().err
    assert f"--dump-config-to {path}: " in error and reason in error
    assert set(default_base().glob(f"{os.getpid()}-*")) == before


def test_a_launch_that_does_not_begin_leaves_what_was_known(tmp_path, capsys):
    path = tmp_path / "config.yml"
    assert serve.main(["recipes/mocker", "--health-port", "70000", "--dump-config-to", str(path)]) == serve.WRONG
    assert "70000 is not a port" in capsys.readouterr().err
    found = yaml.safe_load(path.read_text())
    assert found["state"] == "starting" and found["options"]["health_port"]["value"] == 70000


def test_nobody_else_reads_it_and_a_write_that_fails_leaves_the_one_before(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("before")
    path.chmod(0o644)
    file = ConfigFile(str(path))
    assert path.read_text() == "before"
    file.write({"a": 1})
    assert json.loads(path.read_text()) == {"a": 1} and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        file.write({"a": 2})
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_a_full_disk_is_refused_by_the_option(monkeypatch):
    """/proc takes no file, as a disk does that is read-only."""
    with pytest.raises(ConfigError, match=r"--dump-config-to /proc/config.json: can't be written: "):
        ConfigFile("/proc/config.json")
