"""ai-dynamo: its Rust frontend and its mocker as two processes, by file discovery: neither etcd nor NATS is needed.

The environment is made once, in a cache folder, with the packages that these two need. ai-dynamo's own
dependency aisimulate is left out: its perf models are not used here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.contenders.endpoint import Endpoint

VERSION = "1.6.1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bireme"
_OWN = (f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}")
_NEEDED = (
    "aiohttp>=3.14,<4", "certifi", "kubernetes>=32,<33", "msgspec>=0.19", "numpy", "prometheus-client<1",
    "pydantic>=2.10.6,<=2.13.5", "pyzmq>=26", "redis>=6.2,<9", "tqdm", "transformers>=4.56", "typing-extensions",
    "uvloop>=0.21", "zstandard",
)  # fmt: skip
_START_S = 60.0
# 0 is not infinite: its mocker then keeps its own pace of about 5 ms.
FASTEST = ("--speedup-ratio", "1000")
TOKEN_CACHE = {"DYN_TOKENIZER_CACHE": "1", "DYN_TOKENIZER_CACHE_EXTEND": "1"}  # of prompts' beginnings: off by default
TOKENIZERS = {"fastokens": "fastokens", "tokenizers": "default"}  # our names -> its own


@contextlib.contextmanager
def dynamo(model: Path, step_ms: float, port: int, tokenizer: str) -> Iterator[Endpoint]:
    """Both processes on this model; a step and a prefill take `step_ms` whatever they hold, 0: as fast as it can."""
    python = environment()
    with tempfile.TemporaryDirectory(prefix="bireme-dynamo-") as folder, contextlib.ExitStack() as stack:
        env = {"DYN_FILE_KV": f"{folder}/discovery", "HF_HUB_OFFLINE": "1", "DYN_LOG": "warn"} | TOKEN_CACHE
        pace = ("--planner-profile-data", str(write_pace(Path(folder), step_ms))) if step_ms else FASTEST
        common = ("--discovery-backend", "file")
        backend = ("--tokenizer", TOKENIZERS[tokenizer], "--no-tokenizer-fallback")
        front = stack.enter_context(
            running([python, "-m", "dynamo.frontend", "--http-port", str(port), *backend, *common], folder, env)
        )
        worker = stack.enter_context(
            running([python, "-m", "dynamo.mocker", *worker_options(model), *pace, *common], folder, env)
        )
        endpoint = Endpoint("dynamo", f"127.0.0.1:{port}", "mocker", {"frontend": front.pid, "mocker": worker.pid})
        wait_until_it_answers(endpoint, (front, worker), Path(folder))
        yield endpoint


def worker_options(model: Path) -> tuple[str, ...]:
    """As the recipe of our mocker: 1024 requests at once, blocks of 32 tokens, 4 M tokens of them."""
    sizes = {"max-num-seqs": 1024, "block-size": 32, "num-gpu-blocks-override": 131072, "max-num-batched-tokens": 65536}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    return ("--model-path", str(model), "--model-name", "mocker", *options)


def write_pace(folder: Path, step_ms: float) -> Path:
    """Write the timing model: the same time for every size."""
    grid = np.array([1.0, 100.0, 10_000.0, 1_000_000.0])
    file = folder / "pace.npz"
    np.savez(
        file,
        prefill_isl=grid,
        prefill_ttft_ms=np.full(4, step_ms),
        decode_active_kv_tokens=grid,
        decode_context_length=grid,
        decode_itl=np.full((4, 4), step_ms),
    )
    return file


def environment() -> str:
    """Return the python of an environment with ai-dynamo, made at the first call (about a minute)."""
    folder = CACHE / f"dynamo-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"making {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--quiet"]
        subprocess.run([*install, "--no-deps", *_OWN], check=True)
        subprocess.run([*install, *_NEEDED], check=True)
        (folder / "complete").touch()
    return str(python)


@contextlib.contextmanager
def running(command: list[str], folder: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    log = Path(folder) / f"{command[2]}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=stream, stderr=stream)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_it_answers(endpoint: Endpoint, processes: tuple[subprocess.Popen[bytes], ...], folder: Path) -> None:
    """Raises RuntimeError with what the processes said."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            endpoint.probe(2)
            return
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                said = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
                raise RuntimeError(f"dynamo does not answer ({error}):\n{said}") from error
            time.sleep(0.2)
