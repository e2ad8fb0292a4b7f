"""Workers that sleep and wake by the launch's admin door, which is a real one over HTTP."""

import io

import pytest

from bireme.discovery import run_folder
from bireme.errors import BiremeError
from bireme.launch.admin_client import DoorClient
from bireme.launch.admin_door import AdminDoor, AdminSettings
from bireme.launch.console import Console
from bireme.launch.operations import Operations
from bireme.scaling.sleeping_workers import SleepingWorkers, size_of
from tests.launch.fake_launch import FakeLaunch
from tools import plan

KEY = "0123456789abcdef0123"
ASLEEP, ENDING, DOWN = ({"ready": False, "reason": reason} for reason in ("asleep", "going to sleep", "engine is down"))
PAGE = "\n".join(
    f'bireme_{name}{{worker="{worker}"}} {value}'
    for worker in ("prefill", "decode", "decode_1")
    for name, value in {
        "engine_up": 1, "requests_running": 3 if worker == "decode_1" else 0, "engine_max_num_tokens": 8192,
        "engine_max_batch_size": 64, "kv_blocks_total": 1000, "kv_blocks_used": 0, "kv_block_tokens": 32,
    }.items()
)  # fmt: skip


@pytest.fixture
def launch(tmp_path):
    made = FakeLaunch(tmp_path)
    made.pages = [PAGE]
    return made


@pytest.fixture
def door(launch, tmp_path):
    console = Console("info", stream=io.StringIO())
    (tmp_path / "admin.key").write_text(KEY)
    opened = AdminDoor(
        AdminSettings(port=0, key_file=str(tmp_path / "admin.key")), Operations(launch, console), console
    )
    opened.start()
    yield DoorClient(f"http://127.0.0.1:{opened.port}", KEY)
    opened.stop()


def test_states_of_workers_are_sizes():
    size = size_of(["ready", "ready", "asleep", "going to sleep", "draining", "engine is down", "stub is down"])
    assert (size.num_ready, size.num_starting, size.num_ending, size.num_workers) == (2, 2, 2, 4)


def test_the_idlest_sleeps_and_the_last_of_a_stage_is_refused(launch, door):
    workers = SleepingWorkers(door)
    assert {stage: size.num_ready for stage, size in workers.sizes().items()} == {"prefill": 1, "decode": 2}
    assert workers.scale({"prefill": 1, "decode": 1}) == ["decode sleeps once its requests have ended"]
    assert run_folder.must_sleep(launch.folder, "decode") and not run_folder.must_sleep(launch.folder, "decode_1")
    launch.states["decode"] = ENDING
    assert workers.sizes()["decode"].num_ending == 1
    launch.states |= {"decode": ASLEEP, "decode_1": DOWN}
    assert (workers.sizes()["decode"].num_ready, workers.sizes()["decode"].num_starting) == (0, 1)


def test_those_that_sleep_are_waked_also_before_they_have_ended(launch, door):
    workers = SleepingWorkers(door)
    workers.scale({"prefill": 1, "decode": 1})
    launch.states["decode"] = ENDING
    assert workers.scale({"prefill": 1, "decode": 2}) == ["decode wakes"]
    assert not run_folder.must_sleep(launch.folder, "decode")


def test_more_than_the_launch_has_are_refused_by_name(door):
    with pytest.raises(BiremeError, match=r"decode: 3 are wanted and the launch has 2; .* lower decode.maximum"):
        SleepingWorkers(door).scale({"prefill": 1, "decode": 3})


def test_pages_come_with_the_clock_of_their_host(launch, door):
    (page,) = SleepingWorkers(door).pages()
    assert PAGE in page.text and page.source == door.address and page.at_s > 1e9
    launch.is_reachable = False
    with pytest.raises(BiremeError, match="metrics can't be read: tritonserver does not answer"):
        SleepingWorkers(door).pages()


def run(door, *arguments, capsys):
    code = plan.main(["--admin", door.address, "--wait", "0", *arguments])
    return code, capsys.readouterr()


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("BIREME_ADMIN_KEY", KEY)
    path = tmp_path / "planner.yaml"
    path.write_text("{max_gpus: 4, interval_s: 0.2}")
    return f"--settings={path}"


def test_the_program_advises_and_changes_nothing(launch, door, settings, capsys):
    options = (settings, "--advise", "--recipe=recipes/mocker-disagg", "--intervals=2")
    code, told = run(door, *options, capsys=capsys)
    assert (
        code == 0 and told.out.count("advice down: prefill 1, decode 2 -> 1 of 4 GPUs; no requests") == 1
    )  # the second time
    assert not run_folder.must_sleep(launch.folder, "decode")


@pytest.mark.parametrize(
    "arguments, told",
    [
        (
            ["--recipe=recipes/mocker"],
            "recipes/mocker: it has decode workers; decode computes prompts as well: say --agg",
        ),
        (["--recipe=recipes/mocker-disagg", "--aggregated"], "it has prefill, decode workers; leave --aggregated out"),
    ],
)
def test_a_recipe_of_the_other_layout_is_refused(door, settings, capsys, arguments, told):
    code, said = run(door, settings, *arguments, capsys=capsys)
    assert code == plan.WRONG and told in said.err


def test_the_program_acts_and_logs(launch, door, settings, tmp_path, capsys):
    log = tmp_path / "decisions.jsonl"
    options = (settings, "--recipe=recipes/mocker-disagg", "--intervals=2", f"--log={log}")
    code, told = run(door, *options, capsys=capsys)
    assert code == 0 and "decode sleeps once its requests have ended" in told.out
    assert run_folder.must_sleep(launch.folder, "decode") and '"result":"down"' in log.read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--advise",), "--times: missing; the target sla sizes by step times"),
        (("--times=nowhere.json",), "nowhere.json: No such file"),
        (("--settings=nowhere.yaml",), "nowhere.yaml: it can't be read"),
        (("--recipe=recipes/mocker-disagg", "--log=/nowhere/log"), "--log /nowhere/log: it can't be written"),
        (("--recipe=recipes/mocker-disagg", "--admin="), "--admin: missing"),
    ],
)
def test_options_that_can_t_be_end_it_with_2(door, monkeypatch, options, says, capsys):
    monkeypatch.setenv("BIREME_ADMIN_KEY", KEY)
    code, told = run(door, *options, capsys=capsys)
    assert code == 2 and says in told.err


def test_a_deployment_without_prefill_workers_is_no_case_for_it(launch, door, settings, capsys):
    launch.pages = [line for line in PAGE.splitlines() if "decode" in line]
    code, told = run(door, settings, "--recipe=recipes/mocker-disagg", capsys=capsys)
    assert code == 2 and "no prefill worker has told what it can do" in told.err and "say --aggregated" in told.err


def test_budgets_below_the_minimum_end_it_with_2(door, settings, tmp_path, capsys):
    (tmp_path / "planner.yaml").write_text("max_gpus: 1")
    code, told = run(door, settings, "--recipe=recipes/mocker-disagg", capsys=capsys)
    assert code == 2 and "planner.max_gpus: 1; the minimum of 1 prefill and 1 decode workers needs 2" in told.err
