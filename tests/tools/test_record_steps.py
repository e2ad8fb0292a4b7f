"""tools/record_steps.py writes what the workers of a launch send."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bireme.config import CHECKOUT
from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord
from bireme.kv.wire.step_records import StepRing
from tests.engines.engine_fixtures import wait_for
from tests.kv.publishing.published import KEY, Published
from tests.kv.publishing.test_step_stream import SCHEDULED, step
from tools import record_steps


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BIREME_KEY", KEY.hex())
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_line_a_step_of_every_worker_and_of_one_that_is_started_again(folder, capfd):
    workers = [Published(folder, name, ring=StepRing(), has_events=False) for name in ("prefill", "decode")]
    for one in workers:
        run_folder.publish(folder, one.record)
    output = folder / "steps.jsonl"
    command = [sys.executable, "tools/record_steps.py", "--run-folder", str(folder), "--output", str(output)]
    reader = subprocess.Popen(command, cwd=CHECKOUT, stderr=subprocess.PIPE)

    def has_all(count):
        for one in workers:
            one.ring.add(step())
            one.publisher.wake()
        written = output.read_text() if output.exists() else ""
        lines = written.rpartition("\n")[0].splitlines()  # the last may be half there
        return len({(record["worker_id"], record["life"]) for record in map(json.loads, lines)}) == count

    try:
        wait_for(lambda: has_all(2))
        workers.pop().close()
        workers.append(Published(folder, "decode", 8, ring=StepRing(), has_events=False))
        run_folder.publish(folder, workers[-1].record)
        wait_for(lambda: has_all(3))
    finally:
        reader.terminate()
        told = reader.communicate()[1].decode()
        for one in workers:
            one.close()
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert reader.returncode == 0 and told.endswith(f"{len(records)} records, 0 missed\n")
    assert records[0]["scheduled_requests"] == SCHEDULED and all(record["wall_time"] for record in records)


def test_it_ends_by_itself_and_tells_what_is_missing(folder, capsys):
    one = Published(folder, ring=StepRing(4), has_events=False)
    run_folder.publish(folder, one.record)
    steps = record_steps.Steps(folder)
    for number in (0, 1, 5):
        record = step()
        record.counter_id = number
        steps._count(record)
    assert steps.num_missed == 3
    assert record_steps.main(["--run-folder", str(folder), "--seconds", "0"]) == 0
    assert capsys.readouterr().err == "0 records, 0 missed\n"
    one.close()


def test_where_nobody_sends_any_the_key_of_the_recipe_is_named(folder, capsys):
    run_folder.publish(folder, WorkerRecord(worker="decode"))
    assert record_steps.main(["--run-folder", str(folder)]) == record_steps.WRONG
    assert "set kv_events.step_records: true" in capsys.readouterr().err


def test_a_folder_of_no_launch_stays_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("BIREME_KEY", raising=False)
    assert record_steps.main(["--run-folder", str(tmp_path)]) == record_steps.WRONG
    assert "no worker of the launch" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_fit_of_too_little_names_its_file(tmp_path, capsys):
    (tmp_path / "steps.jsonl").write_text("")
    table = tmp_path / "table.json"
    assert record_steps.main(["--fit", str(tmp_path / "steps.jsonl"), "--output", str(table)]) == record_steps.WRONG
    assert "steps.jsonl: points: 0 with work" in capsys.readouterr().err and not table.exists()
