"""What an operator asks of a launch: drain, sleep, log level, bounds, and whether it may be ended."""

import io
import logging

import msgspec
import pytest

from bireme.config import BusyRule, RouterConfig
from bireme.discovery import live_settings, run_folder
from bireme.errors import NotFoundError, RequestError
from bireme.launch import operations
from bireme.launch.console import Console
from bireme.launch.operations import ConflictError, Operations
from tests.launch.fake_launch import FakeLaunch


@pytest.fixture
def launch(tmp_path):
    yield FakeLaunch(tmp_path)
    (tmp_path / live_settings.FILE_NAME).unlink(missing_ok=True)
    live_settings.look(tmp_path)


@pytest.fixture
def asked(launch):
    return Operations(launch, Console("info", stream=io.StringIO()))


def test_a_worker_drains_and_takes_requests_again(launch, asked):
    assert asked.drain("decode_1") == {"draining": "decode_1"}
    assert run_folder.is_draining(launch.folder, "decode_1") and not run_folder.is_draining(launch.folder)
    asked.undrain("decode_1")
    assert not run_folder.is_draining(launch.folder, "decode_1")


@pytest.mark.parametrize("ask", ["drain", "undrain", "sleep", "wake"])
def test_an_unknown_worker_is_named_with_those_there_are(asked, ask):
    with pytest.raises(NotFoundError, match="no 'decode_7' here; this launch has prefill, decode, decode_1"):
        getattr(asked, ask)("decode_7")


@pytest.mark.parametrize("ask", ["drain", "sleep"])
def test_the_last_worker_of_a_stage_is_not_taken_out_unless_forced(launch, asked, ask):
    asked.drain("decode_1")
    with pytest.raises(ConflictError, match="decode is the last of decode that takes requests"):
        getattr(asked, ask)("decode")
    assert not run_folder.is_draining(launch.folder, "decode")
    getattr(asked, ask)("decode", force=True)
    assert run_folder.is_draining(launch.folder, "decode")


def test_one_that_is_down_does_not_count_as_another(launch, asked):
    launch.states["decode_1"] = {"ready": False, "reason": "engine is down"}
    with pytest.raises(ConflictError):
        asked.drain("decode")


def test_a_worker_of_another_server_does(launch, asked):
    asked.drain("decode_1")
    launch.add_elsewhere("decode", state="draining")
    with pytest.raises(ConflictError):
        asked.drain("decode")
    launch.add_elsewhere("decode_1")
    asked.drain("decode")


def test_prefill_may_go_since_decode_does_its_work(launch, asked):
    asked.sleep("prefill", free_weights=True)
    assert run_folder.must_free_weights(launch.folder, "prefill")
    assert asked.wake("prefill") == {"wakes": "prefill"}
    with pytest.raises(NotFoundError, match="prefill does not sleep"):
        asked.wake("prefill")


def test_a_log_level_holds_for_the_process_until_it_is_taken_back(asked, monkeypatch):
    monkeypatch.setattr(logging.getLogger("bireme"), "level", logging.WARNING)
    asked.set_log_level("debug")
    assert logging.getLogger("bireme").level == logging.DEBUG
    asked.set_log_level(None)
    assert logging.getLogger("bireme").level == logging.WARNING


def test_bounds_of_busy_workers_replace_the_recipe_s(launch, asked):
    launch.recipe = _with_mode(launch.recipe, "least_loaded")
    asked.set_busy((BusyRule(max_kv_usage=0.5),))
    assert live_settings.current().busy == (BusyRule(max_kv_usage=0.5),)
    asked.set_busy(())
    assert live_settings.current().busy == ()
    asked.set_busy(None)
    assert live_settings.current().busy is None


def test_a_rule_without_a_bound_is_refused(launch, asked):
    launch.recipe = _with_mode(launch.recipe, "least_loaded")
    with pytest.raises(RequestError, match=r"busy\[1\]: no bound"):
        asked.set_busy((BusyRule(max_kv_usage=0.5), BusyRule()))


def test_bounds_need_engines_that_tell_their_load(launch, asked):
    launch.recipe = _with_mode(launch.recipe, "random")
    with pytest.raises(RequestError, match="engines of this recipe tell no load"):
        asked.set_busy((BusyRule(max_kv_usage=0.5),))


def test_a_weight_holds_until_the_one_of_the_start_is_taken_back(asked):
    told = [asked.status()["weight"], asked.set_weight(0.0)["weight"], asked.status()["weight"]]
    assert told == [0.5, 0.0, 0.0]
    assert asked.set_weight(None) == {"generation": 3, "weight": 0.5}
    assert (asked.status()["generation"], asked.status()["weight"]) == (3, 0.5)


def test_settings_that_cannot_be_read_change_nothing(launch, asked):
    asked.set_log_level("error")
    (launch.folder / live_settings.FILE_NAME).write_text('{"log_level": "loud"}')
    live_settings.look(launch.folder)
    assert live_settings.current().log_level == "error"


def test_it_is_safe_to_delete_once_drained_idle_and_known_for_a_while(launch, asked, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(operations.time, "monotonic", lambda: now[0])
    assert asked.status()["reasons"] == ["it takes new requests; drain it first"]
    launch.is_known = False
    asked.drain()
    assert asked.status()["reasons"] == ["other servers have not seen yet that it drains"]
    launch.is_known = True
    assert "idle for 0.0 s" in asked.status()["reasons"][0]
    now[0] += 1.1
    status = asked.status()
    assert status["safe_to_delete"] and status["reasons"] == []


@pytest.mark.parametrize(
    "page, told, counts",
    [
        ('bireme_requests_running{worker="decode"} 2\nbireme_requests_waiting{worker="decode"} 1\n', "3 re", (3, 0, 0)),
        ('bireme_streams{worker="generate"} 4\n', "4 requests", (4, 0, 0)),
        ('bireme_http_requests_active{worker="frontend"} 3.0\n', "2 requests", (2, 0, 0)),
        ('bireme_kv_leases{worker="prefill",state="exported"} 2\n', "2 leases", (0, 2, 0)),
        ('bireme_kv_leases{worker="prefill",state="claimed"} 1\n', "1 leases", (0, 1, 1)),
        ('bireme_kv_leases{worker="prefill",state="acked"} 9\n', "idle", (0, 0, 0)),
    ],
)  # fmt: skip
def test_what_is_under_way_keeps_it(launch, asked, page, told, counts):
    asked.drain()
    launch.pages = [page]
    status = asked.status()
    assert told in status["reasons"][0] and not status["safe_to_delete"]
    assert tuple(status[name] for name in ("in_flight_requests", "leases", "transfers")) == counts


def test_nothing_is_safe_that_cannot_be_told(launch, asked):
    asked.drain()
    launch.is_reachable = False
    assert asked.status()["reasons"] == ["what is under way can't be told: tritonserver does not answer"]


def test_workers_are_told_with_what_they_are_at(launch, asked):
    asked.drain("decode_1")
    launch.states["prefill"] = {"ready": False, "reason": "asleep"}
    workers = asked.status()["workers"]
    assert {name: one["state"] for name, one in workers.items()} == {
        "prefill": "asleep",
        "decode": "ready",
        "decode_1": "draining",
    }


def _with_mode(recipe, mode):
    return msgspec.structs.replace(recipe, router=RouterConfig(mode=mode))


def test_a_comparison_with_another_launch_begins_and_ends(launch, asked):
    (launch.folder / "key").write_text("their-key\n")
    (launch.folder / "mirror-1.json").write_text('{"run": "an earlier one"}')
    fields = {"share": 0.5, "key_file": str(launch.folder / "key"), "generation": 3}
    assert asked.set_mirror("http://b:9000", **fields) == {"mirror": "http://b:9000", "share": 0.5}
    told = asked.status()["mirror"]
    assert (told["url"], told["compared"], told["examples"]) == ("http://b:9000", 0, [])
    assert not list(launch.folder.glob("mirror-*"))
    asked.set_mirror(None, 0, "", None)
    assert asked.status()["mirror"] is None


@pytest.mark.parametrize(
    "url",
    ["b:9000", "ftp://b:9000", "http://b", "http://b:9000/v1", "http://me@b:9000", "http://[b:9000", "http://b:x"],
)
def test_copies_go_to_a_frontend_s_address_alone(asked, url):
    with pytest.raises(RequestError, match=r"^url: .*; send http://host:port"):
        asked.set_mirror(url, 1, "", None)


def test_a_key_file_of_the_other_launch_is_there_and_has_one_key(launch, asked):
    with pytest.raises(RequestError, match=r"^key_file: .* can't be read on this host"):
        asked.set_mirror("http://b:9000", 1, str(launch.folder / "none"), None)
    (launch.folder / "key").write_text("two keys")
    with pytest.raises(RequestError, match=r"^key_file: .*one line with an API key"):
        asked.set_mirror("http://b:9000", 1, str(launch.folder / "key"), None)


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_an_authority_of_the_other_launch_can_be_read(launch, asked, text):
    if text is not None:
        (launch.folder / "ca.crt").write_text(text)
    with pytest.raises(RequestError, match=r"^ca_file: .* can't be read as certificates on this host"):
        asked.set_mirror("https://b:9000", 1, "", None, str(launch.folder / "ca.crt"))
