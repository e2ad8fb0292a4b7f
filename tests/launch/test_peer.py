"""Whose process has accepted a connection: only then it is given a secret."""

import contextlib
import os
import socket
import subprocess
import sys
import threading

import pytest

from bireme.launch import canary, peer
from bireme.launch.canary import CanaryPrompt
from bireme.launch.peer import NotOursError, check_ours

PROMPT = CanaryPrompt("a ship", (1, 2))
STRANGER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
link = listener.accept()[0]
link.settimeout(float(sys.argv[1]))
try:
    print(link.recv(65536), flush=True)
except TimeoutError:
    print("nothing", flush=True)
"""
HOSTS = [
    ("127.0.0.1", "127.0.0.1", socket.AF_INET),
    ("0.0.0.0", "127.0.0.2", socket.AF_INET),
    ("::1", "::1", socket.AF_INET6),
    ("::", "127.0.0.1", socket.AF_INET6),
]


@pytest.fixture
def link():
    """Return a function that gives both ends of a connection, and what accepts it."""
    with contextlib.ExitStack() as stack:

        def connect(listens, called, family):
            is_dual = family == socket.AF_INET6 and listens == "::"
            try:
                listener = socket.create_server((listens, 0), family=family, dualstack_ipv6=is_dual)
            except OSError:
                pytest.skip("this host has no IPv6")
            stack.enter_context(listener)
            client = stack.enter_context(socket.create_connection((called, listener.getsockname()[1])))
            return client, lambda: stack.enter_context(listener.accept()[0])

        yield connect


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_process_of_the_same_user_is_ours_once_it_has_accepted(link, hosts):
    client, accept = link(*hosts)
    with pytest.raises(TimeoutError):
        check_ours(client, 0.02)
    accept()
    check_ours(client, 5)


def test_who_accepts_late_is_waited_for(link):
    client, accept = link(*HOSTS[0])
    timer = threading.Timer(0.1, accept)
    timer.start()
    check_ours(client, 30)
    timer.join()


def test_without_the_kernel_s_table_nobody_is_ours(link, monkeypatch, tmp_path):
    monkeypatch.setattr(peer, "_TABLES", (tmp_path / "tcp", tmp_path / "tcp6"))
    client, accept = link(*HOSTS[0])
    accept()
    with pytest.raises(NotOursError, match="mount /proc whole"):
        check_ours(client, 0.1)


@pytest.fixture
def stranger():
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    with subprocess.Popen(
        [sys._base_executable, "-I", "-S", "-c", STRANGER, "1"], stdout=subprocess.PIPE, text=True
    ) as process:
        yield int(process.stdout.readline()), process
        process.kill()


def test_a_process_of_another_user_is_not_ours(stranger):
    port, process = stranger
    with socket.create_connection(("127.0.0.1", port)) as client, pytest.raises(NotOursError, match="user 65534"):
        check_ours(client, 30)


def test_the_key_of_canaries_is_not_sent_to_another_user_who_listens_at_the_frontend_s_port(stranger):
    port, process = stranger
    result = canary.probe_openai(f"127.0.0.1:{port}", "chat", "the key", PROMPT, 20.0)
    assert "a process of user 65534 listens" in result.error and not result.is_refused
    assert process.stdout.readline() in ("b''\n", "nothing\n")
