"""The child process of the logits_processor model, really started."""

import logging
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bireme.config import Limits, Recipe, SupervisorConfig
from bireme.engines.logits.client import LogitsClient
from bireme.errors import BiremeError, DeadlineExceededError, RequestError, ResourceExhaustedError, UnavailableError
from bireme.logits.application import LogitsJob, apply
from bireme.messages import ProcessorCall

DOC = Path(__file__).resolve().parents[3] / "docs" / "custom_processors.md"
LOGGER = logging.getLogger("bireme.test")
VOCAB = 16


def job(*calls, history=(), num_prompt=0, logits=None):
    logits = np.linspace(-1, 1, VOCAB, dtype=np.float32)[None] if logits is None else logits
    return LogitsJob(
        processors=tuple(ProcessorCall(name, args) for name, args in calls),
        logits=logits.tobytes(),
        vocab_size=VOCAB,
        histories=(np.array(history, np.int32).tobytes(),) * len(logits),
        num_prompt_tokens=(num_prompt,) * len(logits),
        eos_ids=(2,),
    )


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory):
    """Install, for child processes, the package of the documentation and one that behaves badly."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "no_repeat.py").write_text(re.search(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL).group(1))
    (folder / "bad.py").write_text(
        "import os, signal, time\n"
        "class Bad:\n"
        "    def __init__(self, context, how): self.how = how\n"
        "    def __call__(self, token_ids, logits):\n"
        "        if self.how == 'die': os.kill(os.getpid(), signal.SIGSEGV)\n"
        "        if self.how == 'hang': time.sleep(60)\n"
        "        raise RuntimeError(self.how)\n"
    )
    entry = re.search(r"^no_repeat = \"(.*)\"$", DOC.read_text(), re.MULTILINE).group(1)
    for name, target in {"no_repeat": entry, "bad": "bad:Bad"}.items():
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[bireme.logits_processors]\n{name} = {target}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def client():
    """Return a client whose child imports torch, as it does where processors work."""
    client = client_of()
    yield client
    client.stop()


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a maker of clients whose children have what they need of torch and no more: what lives and ends here."""
    (tmp_path / "torch.py").write_text("def from_numpy(array): return array\ndef set_grad_enabled(is_on): pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    made = []

    def client(**settings):
        made.append(client_of(**settings))
        return made[-1]

    yield client
    for one in made:
        one.stop()


def client_of(idle_s=300.0, limits=None, **supervisor):
    recipe = Recipe(
        model="",
        workers={},
        limits=limits or Limits(),
        supervisor=SupervisorConfig(**{"restart_backoff_s": 0.0, **supervisor}),
    )
    return LogitsClient(recipe, LOGGER, idle_s)


def ask(client, *args, **kwargs):
    return np.frombuffer(client.submit(job(*args, **kwargs)).result(60), np.float32).reshape(-1, VOCAB)


def test_the_child_starts_with_the_first_job_only(make):
    client = make()
    assert client.pid == 0
    ask(client)
    assert client.pid > 0


def test_the_child_s_answer_is_that_of_the_classes(client):
    logits = np.random.default_rng(0).normal(size=(5, VOCAB)).astype(np.float32)
    calls = [("repetition_penalty", {"penalty": 1.5}), ("top_k", {"top_k": 4})]
    expected = apply(job(*calls, history=[1, 2, 3], logits=logits))
    assert np.array_equal(ask(client, *calls, history=[1, 2, 3], logits=logits), expected)


def test_many_jobs_get_their_own_answers(client):
    calls = [("forced_sequence", {"token_ids": [token]}) for token in range(VOCAB)]
    futures = [client.submit(job(call)) for call in calls]
    answers = [np.frombuffer(future.result(60), np.float32).argmax() for future in futures]
    assert answers == list(range(VOCAB))


def test_the_package_of_the_documentation_works(client):
    row = ask(client, ("no_repeat", {"window": 2}), history=[4, 5, 6, 7], num_prompt=1)[0]
    assert np.flatnonzero(~np.isfinite(row)).tolist() == [6, 7]
    with pytest.raises(RequestError, match="window: 0; a whole number of 1 or more"):
        ask(client, ("no_repeat", {"window": 0}))


def test_an_unknown_processor_is_refused_by_name(client):
    with pytest.raises(RequestError, match="no_repeet does not exist; did you mean no_repeat"):
        ask(client, ("no_repeet", {}))


def test_what_a_processor_raises_ends_its_job_alone(client):
    ask(client)
    pid = client.pid
    with pytest.raises(BiremeError, match="logits processor Bad: RuntimeError: oops") as failed:
        ask(client, ("bad", {"how": "oops"}))
    assert failed.value.code == "INTERNAL"
    ask(client)
    assert client.pid == pid


def test_a_processor_that_kills_its_process_fails_alone(make):
    client = make()
    with pytest.raises(UnavailableError, match="ended .signal SIGSEGV."):
        ask(client, ("bad", {"how": "die"}))
    assert ask(client).shape == (1, VOCAB)


@pytest.mark.flaky(reruns=1)
def test_a_killed_child_comes_back(make):
    client = make()
    ask(client)
    pid = client.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="SIGKILL"):
        ask(client)
    assert ask(client).shape == (1, VOCAB) and client.pid != pid


def test_a_processor_that_hangs_is_ended_at_the_limit(make):
    client = make(stall_timeout_s=1.0)
    ask(client)
    with pytest.raises(DeadlineExceededError, match="longer than 1 s .supervisor.stall_timeout_s."):
        ask(client, ("bad", {"how": "hang"}))
    assert client.pid == 0


def test_a_child_that_ends_again_and_again_stays_down(make):
    client = make(max_restarts=1)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="SIGSEGV"):
            ask(client, ("bad", {"how": "die"}))
    with pytest.raises(UnavailableError, match="ended 1 times in 300 s and stays down"):
        ask(client)


def test_an_idle_child_is_ended_and_the_next_job_starts_another(make):
    client = make(idle_s=0.05)
    ask(client)
    deadline = time.monotonic() + 20
    while client.pid and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.pid == 0
    assert ask(client).shape == (1, VOCAB)


def test_jobs_beyond_the_limits_are_refused(make):
    client = make(limits=Limits(max_concurrent_requests=1))
    running = client.submit(job(("bad", {"how": "hang"})))
    with pytest.raises(ResourceExhaustedError, match="1 jobs .* try again"):
        client.submit(job())
    client.stop()
    with pytest.raises(UnavailableError):
        running.result(10)


def test_a_stop_that_comes_while_the_child_starts_ends_its_job(make, monkeypatch):
    client = make()
    start = subprocess.Popen

    def start_late(*args, **kwargs):
        threading.Thread(target=client.stop).start()
        with pytest.raises(UnavailableError, match="shutting down"):
            while True:
                client.submit(job()).cancel()
                time.sleep(0.01)
        time.sleep(0.05)  # stop() has looked for a child by now
        return start(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", start_late)
    with pytest.raises(UnavailableError):
        client.submit(job(("bad", {"how": "hang"}))).result(30)


def test_a_cancelled_job_never_runs(make):
    client = make()
    client.submit(job())  # the child takes its time to start
    assert client.submit(job(("bad", {"how": "die"}))).cancel()
    assert ask(client).shape == (1, VOCAB)


@pytest.mark.flaky(reruns=1)
def test_after_stop_jobs_are_refused_and_the_child_is_gone(make):
    client = make()
    ask(client)
    pid = client.pid
    client.stop()
    client.stop()
    with pytest.raises(UnavailableError, match="shutting down"):
        client.submit(job())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_without_a_python_the_reason_is_said(make, monkeypatch):
    monkeypatch.setenv("BIREME_ENGINE_PYTHON", "/nowhere/python")
    with pytest.raises(BiremeError, match="BIREME_ENGINE_PYTHON"):
        ask(make())
