"""Which workers serve a recipe: own ones, those of other servers, and who is refused."""

import hashlib
import os

import msgspec
import pytest

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.discovery import run_folder
from bireme.discovery.directory import DirectoryStore
from bireme.discovery.records import LaunchFacts, key_id
from bireme.discovery.store import parse_address, with_discovery
from bireme.discovery.view import OwnWorkers, WorkerView, admit, discover
from bireme.errors import ConfigError
from bireme.messages import VERSION
from bireme.metrics import Registry
from bireme.settings import DiscoveryConfig
from tests.discovery.conftest import KEY, MemoryStore, by_id, record


def recipe(**more):
    workers = {"decode": {"engine": "mocker", "replicas": 2}}
    shared = {"discovery": {"backend": "directory", "folder": "/nowhere"}}
    return convert({"model": "models/tiny", "workers": workers, "name": "chat"} | shared | more, Recipe, "test")


def view_of(chosen, folder, shared, metrics=None):
    return WorkerView(chosen, OwnWorkers(chosen, folder), shared, "a:8001", "own launch", metrics)


def test_without_records_the_workers_are_the_recipe_s(tmp_path):
    views = []
    view = discover(recipe(discovery={}), "a:8001", tmp_path)
    view.watch(views.append)
    view.stop()
    assert [(name, one.life) for name, one in views[0].items()] == [("decode", 0), ("decode_1", 0)]
    assert view.report() == {} and view.is_current


def test_without_records_the_workers_are_of_the_launch_s_generation(tmp_path, monkeypatch):
    known = OwnWorkers(recipe(), tmp_path, LaunchFacts(generation=2, weight=0.5)).read()
    assert {(one.generation, one.weight) for one in known.values()} == {(2, 0.5)}
    monkeypatch.setenv("BIREME_GENERATION", "3")
    assert {one.generation for one in OwnWorkers(recipe(), tmp_path).read().values()} == {3}


def test_own_workers_are_known_by_their_records(tmp_path, until):
    views = []
    view = discover(recipe(discovery={}), "a:8001", tmp_path)
    view.watch(views.append)
    run_folder.publish(tmp_path, record(event_endpoint="tcp://x"))
    until(lambda: views[-1]["decode"].event_endpoint == "tcp://x")
    run_folder.publish(tmp_path, record(state="draining"))
    until(lambda: views[-1]["decode"].is_draining)
    run_folder.withdraw(tmp_path, "decode")
    until(lambda: views[-1]["decode"].life == 0)
    view.stop()


def test_other_servers_workers_join_and_leave(tmp_path, until):
    views, shared = [], MemoryStore()
    view = view_of(recipe(), tmp_path, shared)
    view.watch(views.append)
    shared.change(record(), record("prefill"))
    until(lambda: set(views[-1]) == {"decode", "decode_1", "decode@b:8001", "prefill@b:8001"})
    shared.change()
    until(lambda: set(views[-1]) == {"decode", "decode_1"})
    view.stop()


def test_own_workers_serve_while_the_store_can_t_be_reached(tmp_path, until):
    views, shared = [], MemoryStore()
    shared.fail("etcd is gone")
    view = view_of(recipe(), tmp_path, shared)
    view.watch(views.append)
    assert set(views[0]) == {"decode", "decode_1"}
    until(lambda: "etcd is gone" in view.report()["reason"])
    assert not view.is_current
    view.stop()


def test_a_metric_says_whether_the_view_is_an_old_one(tmp_path, until):
    metrics, shared = Registry("generate"), MemoryStore()
    shared.fail("etcd is gone")
    view = view_of(recipe(), tmp_path, shared, metrics)
    view.watch(lambda records: None)
    stale = [("bireme_discovery_stale", ("generate", "chat"), 1.0)]
    until(lambda: metrics.take_delta().gauges == stale)
    shared.change()
    until(lambda: metrics.take_delta().gauges == [(*stale[0][:2], 0.0)])
    view.stop()


def test_a_server_s_own_records_are_not_other_workers(tmp_path):
    mine = by_id(record(server="a:8001", launch="own launch"))
    assert admit(mine, recipe(), {}, "a:8001", "own launch") == ({}, {})


REFUSALS = {
    "model": (record(model="other"), "it serves other as chat, this recipe tiny"),
    "key": (record(key_id="z"), "give all servers one BIREME_KEY"),
    "block": (record(tokens_per_block=16), "tokens_per_block: 16; decode workers here have 32"),
    "name": (record(server="a:8001", launch="theirs"), r"another launch (theirs) has registered this server's address"),
}


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        ({"wire": VERSION}, "", ""),
        ({"wire": VERSION + 1}, "", f"it speaks wire version {VERSION + 1}, this process {VERSION}; send to it by a"),
        ({"model": "tiny-v2", "text_revision": "t", "revision": "r"}, "t", ""),
        ({"model": "tiny-v2", "text_revision": "t"}, "t", "it serves tiny-v2 as chat, this recipe tiny"),
        ({"model": "tiny-v2", "text_revision": "t", "revision": "r"}, "", "it serves tiny-v2 as chat"),
        ({"text_revision": "u"}, "t", "tiny makes other prompts than tiny here (text revision u, here t): tokenizer,"),
        ({"text_revision": "u"}, "", ""),
        ({"text_revision": ""}, "t", ""),
    ],
)
def test_a_worker_may_serve_another_revision_of_the_model_but_not_other_prompts(theirs, ours, why):
    other = record(**theirs)
    admitted, refused = admit(by_id(other), recipe(), {}, text_revision=ours)
    assert (other.id in admitted, refused.get(other.id, "")[: len(why)]) == (not why, why)


def test_nothing_of_a_record_of_another_wire_version_counts_for_others():
    older = record(server="a:1", wire=VERSION + 1, key_id="z", tokens_per_block=16)
    admitted, refused = admit(by_id(older, record()), recipe(), {})
    assert set(admitted) == {"decode@b:8001"} and set(refused) == {older.id}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_worker_that_does_not_fit_is_refused_by_name(kind):
    stranger, reason = REFUSALS[kind]
    own = {"decode": record(server="a:8001", launch="mine")}
    admitted, refused = admit(by_id(stranger, record("prefill", "c:1")), recipe(), own, "a:8001", "mine")
    assert set(admitted) == {"prefill@c:1"}
    assert reason in refused[stranger.id]


def test_strangers_in_a_shared_folder_are_refused_and_the_others_serve(tmp_path, until):
    config = DiscoveryConfig(backend="directory", folder=str(tmp_path / "shared"))
    writer, own = DirectoryStore(config, KEY), tmp_path / "own"
    own.mkdir()
    run_folder.publish(own, record(server="a:8001", launch="own launch"))
    strangers = {
        kind: msgspec.structs.replace(REFUSALS[kind][0], server=f"{kind}:1") for kind in ("model", "key", "block")
    }
    strangers["name"] = record("decode_1", server="a:8001", launch="theirs")
    for one in (*strangers.values(), record("prefill", "c:1")):
        writer.hold(one)
    view = view_of(recipe(), own, DirectoryStore(config, KEY))
    views = []
    view.watch(views.append)
    until(lambda: len(view.report()["refused"]) == len(strangers))
    for kind, one in strangers.items():
        assert REFUSALS[kind][1] in view.report()["refused"][one.id]
    assert set(views[-1]) == {"decode", "decode_1", "prefill@c:1"}
    view.stop()


def test_workers_of_other_models_are_nobody_s_business():
    assert admit(by_id(record(served_model_name="other")), recipe(), {}, "a:1", "x") == ({}, {})


def test_without_own_workers_the_first_says_what_others_must_equal():
    one, two = record(server="b:1", key_id="x"), record(server="c:1", key_id="y")
    admitted, refused = admit(by_id(two, one), recipe(), {})
    assert set(admitted) == {one.id} and set(refused) == {two.id}


def test_a_refusal_is_in_the_report_and_in_the_log(tmp_path, until, caplog):
    shared = MemoryStore()
    view = view_of(recipe(), tmp_path, shared)
    view.watch(lambda records: None)
    shared.change(record(model="other"))
    until(lambda: view.report()["refused"])
    view.stop()
    assert "worker_refused worker=decode@b:8001" in caplog.text


def test_a_server_knows_whether_its_workers_are_registered_and_told_to_drain(tmp_path, until):
    shared = MemoryStore()
    view = view_of(recipe(), tmp_path, shared)
    view.watch(lambda records: None)
    assert view.report()["unregistered"] == ["decode", "decode_1"]
    ours = [record(name, "a:8001", launch="own launch") for name in ("decode", "decode_1")]
    shared.change(*ours)
    until(lambda: not view.report()["unregistered"])
    assert not view.is_drained_elsewhere()
    shared.change(*(record(one.worker, "a:8001", launch="own launch", state="draining") for one in ours))
    until(view.is_drained_elsewhere)
    view.stop()


def test_a_process_without_a_server_needs_a_shared_discovery():
    with pytest.raises(ConfigError, match="no server's address, and discovery.backend is static"):
        discover(recipe(discovery={}), None)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("/shared/x", {"backend": "directory", "folder": "/shared/x"}),
        ("etcd://h", {"backend": "etcd", "endpoints": ["http://h:2379"]}),
        ("etcd://a:1,b/p", {"backend": "etcd", "endpoints": ["http://a:1", "http://b:2379"], "prefix": "p"}),
        ("etcds://h:1", {"backend": "etcd", "endpoints": ["https://h:1"]}),
        ("kubernetes://chat-workers.llm", {"backend": "kubernetes", "service": "chat-workers.llm"}),
    ],
)
def test_an_address_names_a_store(text, block):
    assert parse_address(text) == block


@pytest.mark.parametrize("text", ["folder", "http://h:1", "etcd://", "etcd:///prefix", "kubernetes://"])
def test_an_address_that_names_none_is_refused(text):
    with pytest.raises(ConfigError, match="--discovery: "):
        parse_address(text)


def test_an_address_comes_over_the_recipe_s_block():
    assert with_discovery('{"model": "x"}', "/f") == (
        '{"model": "x", "discovery": {"backend": "directory", "folder": "/f"}}'
    )
    assert with_discovery("", None) == ""


def test_a_launch_and_a_worker_of_it_are_asked_to_drain_apart(tmp_path):
    run_folder.ask_drain(tmp_path, "decode_1")
    assert run_folder.is_draining(tmp_path, "decode_1") and not run_folder.is_draining(tmp_path)
    run_folder.ask_drain(tmp_path, "decode_1", undo=True)
    assert not run_folder.is_draining(tmp_path, "decode_1") and os.listdir(tmp_path) == []


def test_a_key_s_name_says_nothing_about_the_key():
    assert key_id(b"a" * 16) != key_id(b"b" * 16) and len(key_id(b"a" * 16)) == 16


def test_a_version_whose_requests_have_no_struct_of_options_is_told_by_its_key_id():
    """It would not see a request's salt, adapter and priority."""
    former = hashlib.blake2b(b"bireme deployment 2", key=b"a" * 16, digest_size=8).hexdigest()
    assert key_id(b"a" * 16) != former
