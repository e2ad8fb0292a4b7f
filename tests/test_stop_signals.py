"""SIGTERM and SIGINT as they come to a process of its own: what a handler on the main thread gets wrong."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from bireme.stop_signals import on_stop_signal

PROLOGUE = """
    import os, signal, threading, time
    from bireme.stop_signals import on_stop_signal
    def kill(number):
        os.kill(os.getpid(), number)
"""


def run(program):
    source = textwrap.dedent(PROLOGUE) + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30, check=False)


def test_a_hangup_stops_it_too_unless_nohup_has_it_ignored():
    program = """
        signal.signal(signal.SIGHUP, signal.{before})
        told = []
        on_stop_signal(told.append)
        kill(signal.SIGHUP)
        time.sleep(0.2)
        print(len(told))
    """
    assert run(program.format(before="SIG_DFL")).stdout == "1\n"
    assert run(program.format(before="SIG_IGN")).stdout == "0\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_within_the_lock_that_it_wants_itself(name):
    done = run(f"""
        lock, told = threading.Lock(), threading.Event()
        def tell(number):
            with lock:
                print(signal.Signals(number).name)
            told.set()
        on_stop_signal(tell)
        with lock:
            kill(signal.{name})
            time.sleep(0.1)  # a handler of the main thread would have run by now
        told.wait()
    """)
    assert (done.returncode, done.stdout) == (0, f"{name}\n")


def test_a_signal_is_told_while_the_main_thread_cannot_run_a_handler():
    done = run("""
        told = threading.Event()
        on_stop_signal(lambda number: told.set())
        sender = threading.Timer(0.1, kill, (signal.SIGTERM,))
        sender.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as if it had begun to wait just after the signal
        told.wait()
        print("told")
    """)
    assert (done.returncode, done.stdout) == (0, "told\n")


def test_each_signal_is_told_in_its_order_and_a_failure_does_not_end_it():
    done = run("""
        seen, was_told = [], threading.Semaphore(0)
        def tell(number):
            seen.append(number)
            was_told.release()
            raise RuntimeError("odd")
        on_stop_signal(tell)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            kill(number)
            was_told.acquire()
        print(*seen)
    """)
    assert (done.returncode, done.stdout) == (0, "15 2 15\n")
    assert done.stderr.count("RuntimeError: odd") == 3


def test_signals_of_other_handlers_are_left_alone():
    done = run("""
        seen, told = [], threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: seen.append("usr1"))
        on_stop_signal(lambda number: (seen.append(number), told.set()))
        kill(signal.SIGUSR1)
        kill(signal.SIGTERM)
        told.wait()
        print(*seen)
    """)
    assert (done.returncode, done.stdout) == (0, "usr1 15\n")


def test_what_was_there_comes_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    num_files = len(os.listdir("/proc/self/fd"))
    with on_stop_signal(lambda number: None):
        (listener,) = [thread for thread in threading.enumerate() if thread.name == "stop-signals"]
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    listener.join(5)
    assert not listener.is_alive()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == num_files
