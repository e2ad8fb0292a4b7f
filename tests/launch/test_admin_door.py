"""The admin door over HTTP and HTTPS: who gets in, what is refused, and the programs that knock."""

import contextlib
import http.client
import io
import json
import subprocess
import threading

import pytest

from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord
from bireme.errors import ConfigError, UnavailableError
from bireme.launch.admin_client import DoorClient
from bireme.launch.admin_door import AdminDoor, AdminSettings
from bireme.launch.console import Console
from bireme.launch.operations import Operations
from tests.launch.fake_launch import FakeLaunch
from tools import drain, sleep, status

KEY = "0123456789abcdef0123"
PAIR = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@pytest.fixture
def launch(tmp_path):
    return FakeLaunch(tmp_path)


@contextlib.contextmanager
def opened(launch, **settings):
    console = Console("info", stream=io.StringIO())
    door = AdminDoor(AdminSettings(port=0, **settings), Operations(launch, console), console)
    door.start()
    yield door
    door.stop()


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "admin.key"
    path.write_text(KEY + "\n")
    return str(path)


@pytest.fixture
def door(launch, key_file):
    with opened(launch, key_file=key_file) as door:
        yield door


def ask(door, method, path, body=b"", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=20)
    with contextlib.closing(connection):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


KNOWN = {"Authorization": f"Bearer {KEY}", "Content_Type": "application/json"}


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xe9"])
@pytest.mark.parametrize("method, path", [("GET", "/status"), ("POST", "/drain")])
def test_who_shows_no_right_key_is_refused(door, launch, given, method, path):
    code, body = ask(door, method, path, b"{}", Authorization=given, Content_Type="application/json")
    assert code == 401 and KEY not in str(body)
    assert not run_folder.is_draining(launch.folder)


def test_the_key_can_be_changed_while_it_serves_and_without_one_nobody_gets_in(door, key_file):
    with open(key_file, "w") as file:
        file.write("another-key-of-the-operator")
    assert ask(door, "GET", "/status", **KNOWN)[0] == 401
    assert ask(door, "GET", "/status", Authorization="bearer another-key-of-the-operator")[0] == 200
    with open(key_file, "w") as file:
        file.write("")
    assert ask(door, "GET", "/status", Authorization="Bearer ")[0] == 401


@pytest.mark.parametrize(
    "path, body, code, told",
    [
        ("/drain", b'{"worker": "decode"}', 200, "decode"),
        ("/drain", b"", 200, "all"),
        (
            "/drain",
            b'{"worker": "decode", "now": 1}',
            400,
            "unknown field `now`; send a JSON object with worker, force",
        ),
        ("/drain", b"{", 400, "body: "),
        ("/drain", b'{"worker": "x"}', 404, "no 'x' here"),
        ("/sleep", b"{}", 400, "missing required field `worker`"),
        ("/log-level", b'{"level": "loud"}', 400, "Invalid enum value 'loud'"),
        ("/busy", b'{"rules": [{"max_kv_usage": 7}]}', 400, "max_kv_usage"),
        ("/weight", b'{"weight": 1.5}', 400, "weight"),
        ("/weight", b"{}", 400, "missing required field `weight`"),
        ("/explode", b"{}", 404, "POST /drain, /undrain"),
    ],
)
def test_what_is_asked_is_done_or_refused_by_name(door, path, body, code, told):
    assert ask(door, "POST", path, body, **KNOWN)[0] == code
    assert told in str(ask(door, "POST", path, body, **KNOWN)[1])


def test_the_last_worker_is_a_conflict(door, launch):
    launch.states["decode_1"] = {"ready": False, "reason": "asleep"}
    assert ask(door, "POST", "/drain", b'{"worker": "decode"}', **KNOWN)[0] == 409
    assert ask(door, "POST", "/drain", b'{"worker": "decode", "force": true}', **KNOWN)[0] == 200


def test_a_web_page_cannot_post_and_bodies_are_bounded(door, launch):
    form = KNOWN | {"Content_Type": "text/plain"}
    assert ask(door, "POST", "/drain", b"{}", **form)[0] == 415
    assert ask(door, "POST", "/drain", b"{}", **KNOWN | {"Content_Length": str(10 << 20)})[0] == 413
    assert not run_folder.is_draining(launch.folder)


@pytest.mark.parametrize(
    "settings, told",
    [
        ({}, "nobody could be told from anybody"),
        ({"key_file": "nowhere"}, "`openssl rand -hex 32` makes one"),
        ({"client_authority": "ca"}, "give --admin-tls-cert, too"),
        ({"key_file": "short", "certificate": "x"}, "--admin-tls-cert and --admin-tls-key belong together"),
        ({"key_file": "short"}, "at least 16 ASCII characters"),
    ],
)
def test_a_door_that_would_not_hold_is_refused_at_the_start(tmp_path, monkeypatch, settings, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("short")
    with pytest.raises(ConfigError, match=told):
        AdminSettings(port=1, **settings).check()


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """ca, a pair of the door's and one of a client's."""
    folder = tmp_path_factory.mktemp("pki")
    commands = [["req", "-x509", *PAIR, "-days", "2", "-subj", "/CN=ca", "-out", "ca.crt", "-keyout", "ca.key"]]
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("door", "client"):
        commands.append(["req", *PAIR, "-subj", f"/CN={name}", "-out", "request", "-keyout", f"{name}.key"])
        signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        commands.append(["x509", "-req", "-in", "request", *signing, "-out", f"{name}.crt"])
    try:
        for command in commands:
            subprocess.run(["openssl", *command], check=True, capture_output=True, cwd=folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"openssl can't make certificates here: {error}")
    return folder


def test_a_client_with_a_certificate_needs_no_key_and_one_without_gets_no_word(launch, pki):
    pair = {"certificate": str(pki / "door.crt"), "certificate_key": str(pki / "door.key")}
    with opened(launch, **pair, client_authority=str(pki / "ca.crt")) as door:
        address, ca = f"https://127.0.0.1:{door.port}", str(pki / "ca.crt")
        own = (str(pki / "client.crt"), str(pki / "client.key"))
        assert DoorClient(address, authority=ca, certificate=own).status()["status"] == "ready"
        with pytest.raises(UnavailableError):
            DoorClient(address, authority=ca).status()
        with pytest.raises(UnavailableError, match="certificate verify failed"):
            DoorClient(address, certificate=own).status()


def test_one_that_is_slow_with_its_handshake_holds_up_nobody(launch, pki, key_file):
    pair = {"certificate": str(pki / "door.crt"), "certificate_key": str(pki / "door.key")}
    with opened(launch, **pair, key_file=key_file) as door:
        silent = [http.client.HTTPConnection("127.0.0.1", door.port) for _ in range(20)]
        for one in silent:
            one.connect()
        client = DoorClient(f"https://127.0.0.1:{door.port}", KEY, str(pki / "ca.crt"))
        assert client.status()["status"] == "ready"
        for one in silent:
            one.close()


def test_the_programs_act_by_the_door(door, launch, key_file, capsys):
    named = ["--admin", f"http://127.0.0.1:{door.port}", "--admin-key-file", key_file]
    assert drain.main(["decode_1", *named]) == 0 and run_folder.is_draining(launch.folder, "decode_1")
    assert drain.main(["decode", *named]) == 2 and "last of decode" in capsys.readouterr().err
    assert drain.main(["decode_1", "--undo", *named]) == 0
    assert sleep.main(["decode", *named]) == 0 and run_folder.must_sleep(launch.folder, "decode")
    assert sleep.main(["decode", "--wake", *named]) == 0
    assert sleep.main(["decode", "--wake", *named]) == 2 and "does not sleep" in capsys.readouterr().err


def test_the_status_is_told_to_people_and_to_programs(door, key_file, capsys):
    named = ["--admin", f"http://127.0.0.1:{door.port}", "--admin-key-file", key_file]
    assert status.main(named) == status.UNSAFE
    assert "safe to delete: no" in capsys.readouterr().out
    assert status.main(["--json", *named]) == status.UNSAFE
    assert json.loads(capsys.readouterr().out)["workers"].keys() == {"prefill", "decode", "decode_1"}


def test_a_program_sets_a_generation_s_weight(door, key_file, capsys):
    named = ["--admin", f"http://127.0.0.1:{door.port}", "--admin-key-file", key_file]
    told = []
    for weight in ("0.25", "as-started"):
        status.main(["--weight", weight, *named])
        told.append(capsys.readouterr().out.splitlines()[0].partition("generation ")[2].partition(")")[0])
    assert told == ["3, weight 0.25", "3, weight 0.5"]
    for wrong in ("much", "7"):
        assert status.main(["--weight", wrong, *named]) == status.WRONG
        assert "weight" in capsys.readouterr().err


def test_a_drain_waits_until_nothing_is_under_way(door, launch, key_file, capsys):
    named = ["--admin", f"http://127.0.0.1:{door.port}", "--admin-key-file", key_file]
    launch.pages = ['bireme_requests_running{worker="decode"} 1\n']
    assert drain.main(["--all", "--wait", "0.1", *named]) == drain.BUSY
    assert "1 requests are under way" in capsys.readouterr().err
    threading.Timer(0.2, lambda: launch.pages.clear()).start()
    assert drain.main(["--all", "--wait", "30", *named]) == drain.DONE


def test_nobody_at_the_door_is_told_with_its_address(key_file, capsys):
    assert status.main(["--admin", "http://127.0.0.1:1", "--admin-key-file", key_file]) == status.WRONG
    assert "http://127.0.0.1:1: no admin door answers there" in capsys.readouterr().err
    assert status.main(["--admin", "127.0.0.1:1"]) == status.WRONG and "http://host:port" in capsys.readouterr().err
    assert status.main([]) == status.WRONG and "--admin: missing" in capsys.readouterr().err


def test_waiting_needs_a_door(tmp_path, monkeypatch, capsys):
    run_folder.publish(tmp_path, WorkerRecord(worker="decode"))
    assert drain.main(["decode", "--wait", "1", "--run-folder", str(tmp_path)]) == 2
    assert "name its admin door" in capsys.readouterr().err
