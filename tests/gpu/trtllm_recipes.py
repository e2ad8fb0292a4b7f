"""What recipes do here with the TensorRT-LLM that is installed, as one table with an exit code.

    python -m tests.gpu.trtllm_recipes                      every recipe whose model is here and that fits the GPUs
    python -m tests.gpu.trtllm_recipes recipes/qwen3 recipes/qwen3-disagg --model qwen3=/models/Qwen3-0.6B

A recipe is served by tools/serve.py as a user would: it becomes ready, repeats a greedy answer exactly, stays ready
while canaries run, and ends in order; one with prefill and decode apart answers as its decode worker does alone.
Nothing is fetched: a model that is not in its folder or in the hub's cache is skipped.

Exit codes: 0 nothing failed; 1 something did; 2 there is no python, tritonserver, tensorrt_llm or GPU to try.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from bireme.config import Recipe
from bireme.engines.stub.environment import find_python
from bireme.engines.trtllm.pair_rules import yaml_of
from bireme.errors import BiremeError, ConfigError
from bireme.launch.installation import find_installation
from bireme.launch.ports import free_port
from bireme.launch.recipe_check import check_folder
from bireme.recipe_files import load_recipe, recipe_tree

CHECKOUT = Path(__file__).resolve().parents[2]
GOOD, BAD, NOTHING_TO_TRY = 0, 1, 2
PROMPT = "The Rhine is a river that rises in the Alps and"
_GIB = 1 << 30
_MOST_OF_A_GPU = 0.9  # for weights; KV and activations need the rest
_FIND = (
    "import importlib.metadata as m, importlib.util as u; s = u.find_spec('tensorrt_llm');"
    " print(m.version('tensorrt_llm'), s.origin)"
)


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    outcome: Literal["pass", "fail", "skip"]
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.outcome:4}  {self.seconds:7.1f} s  {self.what:44}  {self.reason}"


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found: the engines' python, and each GPU's memory."""

    python: str
    gpu_bytes: list[int]


class Skipped(Exception):
    """It can't be tried here; the text says why."""


class Failed(Exception):
    """It was tried and is wrong."""


def main() -> int:
    options = parse()
    rows: list[Row] = []
    machine = look_around(rows)
    if machine is None:
        return report(rows, NOTHING_TO_TRY)
    models = dict(given.split("=", 1) for given in options.model)
    for folder in map(Path, options.recipes or trtllm_recipes()):
        try_recipe(rows, folder.resolve(), models, machine, options.start_timeout)
    failed = any(row.outcome == "fail" for row in rows)
    return report(rows, BAD if failed else GOOD)


def look_around(rows: list[Row]) -> Machine | None:
    """Note python, tritonserver, tensorrt_llm and GPUs; None where one of them is missing."""
    found: dict[str, Any] = {}
    steps = {
        "tritonserver": lambda: str(find_installation().binary),
        "the engines' python": find_python,
        "tensorrt_llm": lambda: ask_python(found["the engines' python"], _FIND),
        "GPUs": find_gpus,
    }
    for what, step in steps.items():
        began = time.monotonic()
        try:
            found[what] = step()
        except (BiremeError, OSError, KeyError, subprocess.SubprocessError) as error:
            rows.append(Row(what, "fail", time.monotonic() - began, str(error)))
            continue
        text = found[what]
        if what == "GPUs":
            text = ", ".join(f"{size / _GIB:.0f} GiB" for size in found[what])
        rows.append(Row(what, "pass", time.monotonic() - began, str(text)))
    show(rows)
    if any(row.outcome == "fail" for row in rows):
        return None
    return Machine(found["the engines' python"], found["GPUs"])


def ask_python(python: str, code: str) -> str:
    done = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise ConfigError(f"{python}: {last_line(done.stderr)}; name the python that has it in BIREME_ENGINE_PYTHON")
    return done.stdout.strip()


def find_gpus() -> list[int]:
    """Return each GPU's memory in bytes."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    listing = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [int(line) << 20 for line in listing.split()]


def trtllm_recipes() -> list[str]:
    files = sorted((CHECKOUT / "recipes").glob("*/recipe.yaml"))
    return [str(file.parent) for file in files if "engine: trtllm" in file.read_text()]


def try_recipe(rows: list[Row], folder: Path, models: dict[str, str], machine: Machine, timeout_s: float) -> None:
    name = folder.name
    with tempfile.TemporaryDirectory() as scratch:
        answers: dict[str, str] = {}

        def serve(kind: str, tree: dict[str, Any]) -> str:
            answers[kind] = serve_recipe(write_recipe(Path(scratch) / kind / name, tree), machine, timeout_s)
            return f"answers {answers[kind][:40]!r}"

        try:
            tree = read_recipe(folder, models.get(name))
        except (BiremeError, OSError, yaml.YAMLError) as error:
            rows.append(Row(name, "fail", 0.0, str(error)))
            show(rows[-1:])
            return
        tell(rows, name, lambda: serve("whole", tree))
        if "whole" in answers and {"prefill", "decode"} <= tree["workers"].keys():
            tell(rows, f"{name}, decode alone", lambda: serve("alone", aggregated(tree)))
            if "alone" in answers:
                tell(rows, f"{name}: prefill and decode answer as one", lambda: compare(answers))


def tell(rows: list[Row], what: str, step: Any) -> None:
    """Run a step and note its row."""
    began = time.monotonic()
    outcome: Literal["pass", "fail", "skip"] = "pass"
    try:
        reason = step()
    except Skipped as why:
        outcome, reason = "skip", str(why)
    except (Failed, BiremeError, OSError, subprocess.SubprocessError) as error:
        outcome, reason = "fail", str(error)
    rows.append(Row(what, outcome, time.monotonic() - began, reason))
    show(rows[-1:])


def read_recipe(folder: Path, model: str | None) -> dict[str, Any]:
    """Return recipe.yaml with its engine YAMLs in it and the model's place, so that it can be written elsewhere."""
    tree = recipe_tree(folder, "")
    tree["model"] = model or load_recipe(folder, "").model_path
    for worker in tree["workers"].values():
        experts = worker.get("engine_config", {}).get("moe_config", {})
        if isinstance(experts.get("load_balancer"), str):
            experts["load_balancer"] = str(folder / experts["load_balancer"])
    return tree


def aggregated(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of its decode worker alone."""
    result = copy.deepcopy(tree)
    result["workers"] = {"decode": result["workers"]["decode"]}
    result.get("pipeline", {}).pop("enforce_disaggregation", None)
    return result


def write_recipe(folder: Path, tree: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return folder


def serve_recipe(folder: Path, machine: Machine, timeout_s: float) -> str:
    """Serve a recipe and return its greedy answer. Raises Skipped when it can't be tried, Failed when it is wrong."""
    wrong = [str(finding) for finding in check_folder(folder) if finding.severity == "error"]
    if wrong:
        raise Failed("; ".join(wrong[:3]))
    recipe = load_recipe(folder, "")
    check_fit(recipe, machine)
    with running(folder, timeout_s) as ports:
        if "decode" not in recipe.workers:
            return "(ready; no text is asked of it)"
        first, second = complete(ports["http"]), complete(ports["http"])
        if first != second:
            raise Failed(f"a greedy answer came as {first!r} and then as {second!r}")
        time.sleep(2 * ports["canary"])
        if not is_ready(ports["health"]):
            raise Failed("not ready any more after canaries ran")
        return first


def check_fit(recipe: Recipe, machine: Machine) -> None:
    """Raises Skipped with what is missing."""
    weights = weights_of(recipe.model_path)
    needed = gpus_of(recipe)
    if needed > len(machine.gpu_bytes):
        raise Skipped(f"{needed} GPUs are needed, {len(machine.gpu_bytes)} are here")
    ranks = max(1, needed // sum(entry.replicas for entry in recipe.workers.values()))
    share, size = weights / ranks, min(machine.gpu_bytes)
    if share > _MOST_OF_A_GPU * size:
        raise Skipped(f"{share / _GIB:.0f} GiB of weights a GPU, which has {size / _GIB:.0f} GiB")


def gpus_of(recipe: Recipe) -> int:
    """Return how many GPUs a host needs: those that the recipe names, or those that its engines multiply to."""
    named = [device for entry in recipe.workers.values() for device in entry.devices]
    if named:
        return max(named) + 1
    engines = [(entry, stage) for stage, entry in recipe.workers.items() if entry.engine == "trtllm"]
    return max((yaml_of(entry, stage).world_size * entry.replicas for entry, stage in engines), default=1)


def weights_of(model: str) -> int:
    """Return the bytes of a model's weights. Raises Skipped where it is not here."""
    folder = Path(model)
    if not folder.is_dir():
        cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "hub"
        snapshots = sorted((cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*"))
        if not snapshots:
            raise Skipped(f"model {model} is not here: fetch it, or give --model RECIPE=FOLDER")
        folder = snapshots[-1]
    return sum(file.stat().st_size for file in folder.glob("**/*.safetensors"))


@contextlib.contextmanager
def running(folder: Path, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Serve a recipe until the block ends. Raises Failed when it does not become ready, or ends in disorder."""
    ports = {name: free_port() for name in ("http", "grpc", "metrics", "health")}
    options = [f"--{name}-port={port}" for name, port in ports.items()]
    log = folder / "log"
    command = [sys.executable, str(CHECKOUT / "tools" / "serve.py"), str(folder), *options, "--openai-port=0"]
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, "--canary-interval=2"], cwd=CHECKOUT, stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + timeout_s
        while not is_ready(ports["health"]):
            if process.poll() is not None:
                raise Failed(f"serve.py ended with {process.returncode}: {first_error(log)}")
            if time.monotonic() > deadline:
                raise Failed(f"not ready in {timeout_s:.0f} s: {first_error(log)}")
            time.sleep(0.5)
        yield ports | {"canary": 2.0}
    finally:
        code = stop(process)
    if code:
        raise Failed(f"serve.py ended with {code} when it was stopped: {first_error(log)}")


def stop(process: subprocess.Popen[bytes]) -> int:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def complete(port: int) -> str:
    body = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0.0}
    url = f"http://127.0.0.1:{port}/v2/models/completion/generate"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return str(json.loads(reply.read())["text_output"])
    except urllib.error.HTTPError as error:
        raise Failed(f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}") from error


def compare(answers: dict[str, str]) -> str:
    if answers["whole"] != answers["alone"]:
        raise Failed(f"apart {answers['whole']!r}, as one {answers['alone']!r}")
    return "the same greedy answer"


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def first_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no output")[:400]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:300]


def show(rows: list[Row]) -> None:
    for row in rows:
        print(row, flush=True)


def report(rows: list[Row], code: int) -> int:
    counts = [f"{sum(row.outcome == outcome for row in rows)} {outcome}" for outcome in ("pass", "fail", "skip")]
    print("\nverdict\n")
    show(rows)
    words = {GOOD: "nothing failed", BAD: "something failed", NOTHING_TO_TRY: "there is nothing to try here"}
    print(f"\n{', '.join(counts)}: {words[code]}")
    return code


def parse() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="folders; default: all with engine trtllm")
    parser.add_argument("--model", action="append", default=[], metavar="RECIPE=FOLDER", help="a model's folder")
    parser.add_argument("--start-timeout", type=float, default=3600.0, metavar="S", help="for a recipe to be ready")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
