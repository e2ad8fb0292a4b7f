"""tools/check_fabric.py: what it measures between two ends of this host, what it makes of it, and its errors."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from bireme.errors import ConfigError
from tests.kv.transfer.needs import needs_nixl
from tools import check_fabric
from tools.fabric import ends, link
from tools.fabric.break_even import Curve, break_even
from tools.fabric.layout import model_layout, moved_bytes, plain_layout

KEY = b"k" * 32
LLAMA = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setenv("BIREME_KEY", KEY.hex())
    monkeypatch.setattr(check_fabric, "PIECES", {4096: 4, 1 << 20: 2})
    monkeypatch.setattr(link, "SOURCE_BYTES", 1 << 20)
    monkeypatch.setattr(link, "ROOM_BYTES", 1 << 20)


@pytest.fixture(scope="module")
def exports():
    return check_fabric.Exports()


@pytest.fixture(scope="module")
def listener(exports):
    """Its port."""
    listener = link.Listener(0, KEY, exports.handlers())
    thread = threading.Thread(target=listener.serve)
    thread.start()
    yield listener.port
    listener.close()
    thread.join(60)
    exports.close()


def run(port, *arguments):
    return check_fabric.main(["127.0.0.1", "--port", str(port), *arguments])


@needs_nixl
def test_a_table_says_what_moves_at_which_rate_and_where_it_pays(listener, capfd):
    options = ["--kv-bytes-per-token", "4096", "--tokens", "32", "256", "--rounds", "2", "--json"]
    assert run(listener, *options, "--prefill-ms-per-token", "1000") == check_fabric.GOOD
    told = capfd.readouterr().out
    assert "NIXL, host memory, by" in told and "disaggregation pays from prompts of 1 tokens on" in told
    found = json.loads(told.splitlines()[-1])
    (way,) = found["ways"]
    assert way["tokens"].keys() == {"32", "256"} and found["socket"].keys() == {"4096", str(1 << 20)}
    assert all(figures["GB/s"] > 0 for figures in (*way["tokens"].values(), *found["socket"].values()))
    assert way["router"]["prefill_ms_per_token"] == 1000 and found["kv_bytes_per_token"] == 4096


@needs_nixl
def test_prefill_s_times_come_from_points_and_rows_from_a_recipe(listener, capfd):
    arguments = ["--recipe", "recipes/tiny-chat-disagg", "--tokens", "64", "--prefill-ms", "1:0.00001,100:0.00002"]
    assert run(listener, *arguments) == check_fabric.GOOD
    assert "computing a prompt is quicker than moving its KV" in capfd.readouterr().out


def test_a_way_that_can_not_be_measured_says_why_and_the_rest_is_measured(listener, monkeypatch, capfd):
    def refuse(*args, **options):
        raise ConfigError("NIXL needs the package nixl-cu12: pip install --no-deps nixl-cu12")

    monkeypatch.setattr(ends, "create_transfer", refuse)
    assert run(listener, "--tokens", "32", "--kv-bytes-per-token", "64") == check_fabric.PARTLY
    told = capfd.readouterr().out
    assert "not measured: 127.0.0.1:" in told and "pip install --no-deps nixl-cu12" in told and "socket" in told


def test_another_version_is_refused(listener, exports, monkeypatch, capfd):
    facts = ends.HostFacts("9.9", 99, "elsewhere", "", "", "")
    monkeypatch.setattr(exports, "_facts", facts)
    assert run(listener) == check_fabric.WRONG
    assert "has version 99 of KV transfers (bireme 9.9)" in capfd.readouterr().err


def test_another_key_is_refused(listener, monkeypatch, capfd):
    monkeypatch.setenv("BIREME_KEY", "ab" * 32)
    monkeypatch.setattr(link, "CONNECT_S", 1.0)
    assert run(listener) == check_fabric.WRONG
    assert "does not let this host in; give both the same BIREME_KEY" in capfd.readouterr().err


def test_no_key_is_refused(monkeypatch, capfd):
    monkeypatch.delenv("BIREME_KEY")
    assert check_fabric.main(["--listen"]) == check_fabric.WRONG
    assert "BIREME_KEY: not set" in capfd.readouterr().err


def test_a_closed_port_and_one_of_something_else_are_told_apart(capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0")).start()
        assert run(port) == check_fabric.WRONG
        assert "something else listens there" in capfd.readouterr().err
    assert run(port) == check_fabric.WRONG
    assert f"127.0.0.1:{port}: the port is closed; start `python tools/check_fabric.py" in capfd.readouterr().err


def test_a_port_that_is_taken_is_refused(listener, capfd):
    assert check_fabric.main(["--listen", "--port", str(listener)]) == check_fabric.WRONG
    assert f"--port {listener}: can't listen there" in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["host", "--listen"], ["host", "--prefill-ms", "12"], ["host", "--tokens", "0"]]
)
def test_options_that_make_no_sense_are_refused(arguments, capfd):
    with pytest.raises(SystemExit, match="2"):
        check_fabric.main(arguments)


def test_pieces_go_to_nobody_without_the_token():
    server = link.PieceServer()
    with pytest.raises(ConfigError, match="does not get through"):
        link.piece_rates("127.0.0.1", server.port, b"x" * 32, {4096: 1})


def test_break_even_is_where_the_curves_meet_for_good():
    prefill = Curve.of({128: 8.0, 1024: 30.0, 4096: 120.0})
    assert break_even(Curve.of({128: 4.0, 4096: 20.0}), prefill) == 1  # at any length
    assert break_even(Curve.of({128: 4.0, 1024: 40.0, 4096: 100.0}), prefill) == pytest.approx(2049, abs=2)
    assert break_even(Curve.of({128: 9.0, 4096: 900.0}), prefill) is None
    assert break_even(Curve.of({1000: 200.0, 2000: 201.0}), Curve.line(0.1)) == pytest.approx(2011, abs=20)


def test_the_router_s_settings_are_a_line_through_what_was_measured():
    start, slope = Curve.of({100: 3.0, 1000: 12.0, 10_000: 102.0}).fit()
    assert (start, slope) == (pytest.approx(2), pytest.approx(0.01))
    assert Curve.of({100: 5.0}).fit() == (0.0, 0.05)


def test_a_model_s_bytes_are_read_from_its_config():
    assert model_layout(LLAMA, "llama").bytes_per_token == 4 * 2 * 2 * 64 * 2
    assert model_layout(LLAMA, "llama", 1).bytes_per_token == 4 * 2 * 2 * 64
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    windows = model_layout({"text_config": LLAMA | {"sliding_window": 100, "layer_types": kinds}}, "gemma")
    assert [(group.window, len(group.row_bytes)) for group in windows.groups] == [(0, 1), (100, 3)]
    assert moved_bytes(windows, 1000) == 512 * (1000 + 3 * 100) and moved_bytes(windows, 10) == 512 * 40
    latent = model_layout(LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "deepseek")
    assert latent.bytes_per_token == 4 * 576 * 2
    with pytest.raises(ConfigError, match="odd: 'num_hidden_layers' is not there; .*--kv-bytes-per-token"):
        model_layout({"num_attention_heads": 2, "hidden_size": 8}, "odd")
    assert plain_layout(131072).bytes_per_token == 131072
