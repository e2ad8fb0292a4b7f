"""How an engine process is found, on its own server and on others, and how it finds them."""

import time
from unittest.mock import Mock

import msgspec
import pytest

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.discovery import live_settings, run_folder
from bireme.discovery.directory import DirectoryStore
from bireme.discovery.live_settings import LiveSettings
from bireme.discovery.view import own_record
from bireme.engines.child.presence import Presence
from bireme.errors import ConfigError, NotFoundError
from bireme.settings import DiscoveryConfig

KEY = b"k" * 32


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("BIREME_ADVERTISE", "a:8001")
    monkeypatch.setenv("BIREME_KEY", KEY.hex())
    made = []

    def make(**more):
        block = {"backend": "directory", "folder": str(tmp_path / "shared"), "lease_s": 2} | more
        tree = {"model": "none", "workers": {"decode": {"engine": "mocker"}}, "name": "test", "discovery": block}
        recipe, folder = convert(tree, Recipe, "test"), tmp_path / f"run{len(made)}"
        folder.mkdir()
        made.append(Presence(recipe, folder))
        return made[-1], folder, own_record(recipe, "decode", 7, folder, KEY)

    yield make
    for presence in made:
        presence.close()


@pytest.fixture
def shared(tmp_path):
    store = DirectoryStore(DiscoveryConfig(backend="directory", folder=str(tmp_path / "shared")), KEY)

    def read():
        try:
            return store.read()
        except Exception:  # not made yet
            return {}

    return read


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_it_is_found_in_the_run_directory_and_by_other_servers(bench, shared):
    presence, folder, record = bench()
    presence.publish(record)
    assert run_folder.find(folder, "decode") == record and record.id == "decode@a:8001"
    until(lambda: shared() == {record.id: record})
    presence.close()
    assert shared() == {}


def test_a_worker_that_is_drained_says_so_everywhere(bench, shared):
    presence, folder, record = bench()
    presence.publish(record)
    run_folder.ask_drain(folder, "decode")
    presence.look()
    assert run_folder.find(folder, "decode").is_draining
    until(lambda: shared() and shared()[record.id].is_draining)
    run_folder.ask_drain(folder, "decode", undo=True)
    presence.look()
    until(lambda: not shared()[record.id].is_draining)


def test_a_generation_and_its_weight_are_told_everywhere_and_the_weight_can_be_changed(bench, shared, monkeypatch):
    monkeypatch.setenv("BIREME_GENERATION", "4")
    monkeypatch.setenv("BIREME_WEIGHT", "0.25")
    presence, folder, record = bench()
    presence.publish(record)
    until(lambda: shared() and (shared()[record.id].generation, shared()[record.id].weight) == (4, 0.25))
    live_settings.write(folder, LiveSettings(weight=0.0))
    presence.look()
    assert run_folder.find(folder, "decode").weight == 0
    until(lambda: shared()[record.id].weight == 0)
    (folder / live_settings.FILE_NAME).unlink()
    presence.look()
    until(lambda: shared()[record.id].weight == 0.25)


def test_a_launch_that_ends_says_so_to_others_only(bench, shared):
    presence, folder, record = bench()
    presence.publish(record)
    run_folder.ask_drain(folder)
    presence.look()
    until(lambda: shared() and shared()[record.id].is_draining)
    assert not run_folder.find(folder, "decode").is_draining


def test_it_finds_its_own_server_s_workers_and_others(bench, monkeypatch):
    one, folder, record = bench()
    monkeypatch.setenv("BIREME_ADVERTISE", "b:8001")
    other, _, theirs = bench()
    one.publish(record)
    other.publish(theirs)
    assert one.find("decode") == one.find("decode@a:8001") == record
    until(lambda: "decode@b:8001" in one._peers.records)
    assert one.find("decode@b:8001") == theirs
    with pytest.raises(NotFoundError, match="decode@c:1 is not in discovery"):
        one.find("decode@c:1")


def test_without_an_address_it_can_t_be_found(bench, monkeypatch):
    for name in ("BIREME_ADVERTISE", "BIREME_GRPC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="this server's address is not known; .* set BIREME_ADVERTISE"):
        bench()


def test_alone_it_has_no_address_and_no_store(bench):
    presence, folder, record = bench(backend="static", folder="")
    presence.publish(record)
    assert presence.server == "" and run_folder.find(folder, "decode") == record
    (folder / "decode.json").unlink()
    presence.look()
    assert run_folder.find(folder, "decode") == record


def test_all_records_of_a_process_say_that_its_launch_ends(bench, shared, monkeypatch):
    """Also when the run folder could not be written in the first look."""
    presence, folder, record = bench()
    share = msgspec.structs.replace(record, worker="decode-mm")
    for one in (share, record):
        presence.publish(one)
    run_folder.ask_drain(folder)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "publish", Mock(side_effect=OSError("no space left")))
        presence.look()
    presence.look()
    until(
        lambda: {name: one.state for name, one in shared().items()} == dict.fromkeys((record.id, share.id), "draining")
    )
    assert not run_folder.find(folder, "decode").is_draining
