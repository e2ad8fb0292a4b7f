"""The proof in a record of a shared store: what is taken, and what is left out with its reason."""

import os
from pathlib import Path

import msgspec
import pytest

from bireme.discovery import run_folder
from bireme.discovery.directory import DirectoryStore
from bireme.discovery.records import LaunchFacts, WorkerRecord, open_record, seal_record
from bireme.discovery.store import StoreError
from bireme.discovery.view import create_store, discover
from bireme.errors import ConfigError
from bireme.settings import DiscoveryConfig
from tests.discovery.conftest import KEY, by_id, record
from tests.discovery.test_view import recipe


class NewerRecord(WorkerRecord, frozen=True, kw_only=True):
    later: str = "a field of a later version"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", KEY.hex())
    return DiscoveryConfig(backend="directory", folder=str(tmp_path / "shared"))


@pytest.fixture
def store(config):
    store = DirectoryStore(config, KEY)
    store.hold(record())
    return store


@pytest.mark.parametrize(
    ("name", "value"), [("GENERATION", "-1"), ("GENERATION", "new"), ("WEIGHT", "1.5"), ("WEIGHT", "nan")]
)
def test_a_launch_s_facts_that_are_none_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"BIREME_{name}: {value}; 0 to "):
        LaunchFacts.of({f"BIREME_{name}": value})


def test_a_launch_s_facts_reach_its_processes():
    assert LaunchFacts.of({}) == LaunchFacts(generation=0, weight=1.0)
    facts = LaunchFacts(generation=7, weight=0.1)
    assert LaunchFacts.of(facts.environment()) == facts


def put(config, one, blob):
    with open(f"{config.folder}/{one.id}.json", "wb") as file:
        file.write(blob)


def test_a_sealed_record_is_proven_and_its_text_is_still_the_record_s_json():
    blob = seal_record(record(), KEY)
    assert open_record(blob, KEY) == (record(), "")
    assert msgspec.json.decode(blob, type=WorkerRecord) == record(), "older versions read it, too"


def test_a_record_of_a_later_version_is_proven():
    assert open_record(seal_record(NewerRecord(worker="decode"), KEY), KEY) == (WorkerRecord(worker="decode"), "")


def test_of_a_record_in_another_wire_version_s_form_the_name_is_told(config, store):
    blob = b'{"mac":"0","worker":"decode","server":"c:1","served_model_name":"chat","wire":99,"capacity":[7]}'
    put(config, record("decode", "c:1"), blob)
    assert set(store.read()) == {record().id}
    assert "it speaks wire version 99" in store.refused["decode@c:1"][1]
    with pytest.raises(ValueError, match="capacity"):
        open_record(blob.replace(b"99", b"0"), KEY)


def test_no_byte_of_a_record_can_be_changed():
    blob = seal_record(record(), KEY)
    for at in range(len(blob)):
        changed = blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]
        try:
            assert open_record(changed, KEY)[1], changed
        except ValueError:
            continue


FORGED = {
    "not signed": lambda one: msgspec.json.encode(one),
    "signed with another deployment key": lambda one: seal_record(one, b"z" * 32),
}


@pytest.mark.parametrize("reason", FORGED)
def test_a_record_without_proof_is_left_out_with_its_reason(config, store, caplog, reason):
    forged = record("decode", "attacker:1")
    put(config, forged, FORGED[reason](forged))
    for _ in range(3):
        assert store.read() == by_id(record())
    assert reason in store.refused[forged.id][1] and caplog.text.count(f"record_refused path={config.folder}") == 1


@pytest.mark.parametrize("reason", FORGED)
def test_a_forged_record_that_sorts_first_refuses_nobody(config, store, until, reason):
    forged = record("decode", "a.attacker:1", key_id="forged")
    put(config, forged, FORGED[reason](forged))
    view = discover(recipe(discovery={"backend": "directory", "folder": config.folder}), None)
    view.watch(lambda records: None)
    until(lambda: view.report()["current"])
    until(lambda: view.report()["workers_elsewhere"] == 1)
    assert list(view.report()["refused"]) == [forged.id] and reason in view.report()["refused"][forged.id]
    view.stop()


def test_unproven_records_of_other_models_are_nobody_s_business(config, store):
    put(config, record("decode", "c:1"), msgspec.json.encode(record("decode", "c:1", served_model_name="other")))
    view = discover(recipe(discovery={"backend": "directory", "folder": config.folder}), None)
    store.read()
    assert list(store.refused) == ["decode@c:1"] and view.report()["refused"] == {}


def test_an_id_that_somebody_has_forged_is_taken_back(config, store):
    forged = record(launch="theirs")
    put(config, forged, msgspec.json.encode(forged))
    store.hold(record())
    put(config, forged, msgspec.json.encode(forged))
    DirectoryStore(config, KEY).hold(record(life=2))
    assert store.read()["decode@b:8001"].life == 2


def test_a_folder_that_others_may_write_to_is_taken_from_them_by_its_readers(config, store):
    os.chmod(config.folder, 0o777)
    store.read()
    assert os.stat(config.folder).st_mode & 0o077 == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of somebody else")
def test_a_folder_of_another_user_is_refused_by_its_readers_at_once_and_later(config, store):
    os.chown(config.folder, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345.*name another in discovery.folder"):
        create_store(config)
    with pytest.raises(StoreError, match="belongs to user 12345.*name another in discovery.folder"):
        store.read()
    with pytest.raises(StoreError, match="belongs to user 12345"):
        store.hold(record(life=2))


def test_who_has_no_key_takes_that_of_the_folder(config, monkeypatch):
    monkeypatch.delenv("BIREME_KEY")
    writer, reader = create_store(config), create_store(config)
    writer.hold(record())
    assert reader.read() == by_id(record())
    assert run_folder.deployment_key(Path(config.folder)) != KEY
