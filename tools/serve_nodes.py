"""Serve a recipe on several nodes: an engine that spans them, or prefill and decode on nodes of their own.

    python tools/serve_nodes.py recipes/deepseek-r1-wide-ep --dry-run
    python tools/serve_nodes.py recipes/deepseek-r1-wide-ep --with mpirun --hosts node1,node2,node3,node4 --dry-run
    srun ... or salloc ... first; then:  python tools/serve_nodes.py recipes/deepseek-r1-wide-ep -- --host 0.0.0.0
    python tools/serve_nodes.py recipes/deepseek-r1-disagg --discovery etcd://head:2379 --dry-run

One task a GPU runs `trtllm-llmapi-launch python tools/serve.py RECIPE`: rank 0 becomes the server (the leader), all
others TensorRT-LLM's workers. What follows `--` goes to serve.py. An engine that fits one node needs none of this:
TensorRT-LLM starts its ranks itself, and the program says so. --dry-run prints the commands; without it, they are run.

With --discovery there is a server for each engine that spans nodes, and one for each node's share of the others; the
servers find each other there. Each command takes nodes of its own, in the order of --hosts or of the allocation, and
when one of them ends the others are ended, too.

A rank that has died takes its MPI world along, so the engine is not started again (supervisor.max_restarts 0): the
job ends, and Slurm's --requeue or the operator starts it again.

Exit codes: the command's; 2 when the recipe can't be served this way.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT, Recipe
from bireme.discovery.store import parse_address
from bireme.engines.trtllm import pair_rules
from bireme.engines.trtllm.config import prepared
from bireme.engines.trtllm.engine_yaml import Yaml
from bireme.engines.trtllm.problems import errors
from bireme.errors import ConfigError
from bireme.recipe_files import load_recipe
from bireme.stop_signals import on_stop_signal

WRONG = 2
GPUS_PER_NODE = 8
# Open MPI hands only named variables on to other nodes.
PASSED_ON = (
    "BIREME_KEY",
    "HF_TOKEN",
    "HF_HOME",
    "TLLM_LOG_LEVEL",
    "NCCL_MNNVL_ENABLE",
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "PATH",
)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        recipe = checked(load_recipe(options.recipe))
        commands = server_plans(recipe, options) if options.discovery else [plan(recipe, options)]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return WRONG
    for command in commands:
        print(shlex.join(command))
    if options.dry_run:
        return 0
    sys.stdout.flush()
    if len(commands) == 1:
        os.execvp(commands[0][0], commands[0])
    return run_together(commands)


def run_together(commands: list[list[str]]) -> int:
    """Run the commands until one of them ends or this program is told to stop; end the others, in good order."""
    stopping = threading.Event()
    running = [subprocess.Popen(command, start_new_session=True) for command in commands]
    with on_stop_signal(lambda number: stopping.set()):
        while not stopping.wait(0.2) and all(process.poll() is None for process in running):
            pass
    code = 0
    for number, process in enumerate(running):
        if process.returncode is not None and not stopping.is_set():
            code = code or process.returncode
            told = f"server {number + 1} of {len(running)} has ended with exit code {process.returncode}"
            print(f"{told}, so all are ended: {shlex.join(commands[number])}", file=sys.stderr)
    for process in running:
        process.terminate()
    for process in running:
        process.wait()
    return code


def parse(arguments: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    given = sys.argv[1:] if arguments is None else arguments
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        usage="%(prog)s RECIPE [options] [-- SERVE_ARGUMENT ...]", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("recipe")
    parser.add_argument("--with", dest="launcher", choices=("srun", "mpirun"), default="srun")
    parser.add_argument("--gpus-per-node", type=int, default=0, help="default: the YAML's gpus_per_node, else 8")
    parser.add_argument("--hosts", default="", metavar="A,B", help="with mpirun: the nodes; the first runs the server")
    parser.add_argument(
        "--discovery", metavar="ADDRESS",
        help="where the servers find each other, as for serve.py: etcd://host:2379, or a folder that all nodes see",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the command only")
    options = parser.parse_args(given[:at])
    options.serve_arguments = given[at + 1 :]
    return options


def checked(recipe: Recipe) -> Recipe:
    """Raises ConfigError with everything that TensorRT-LLM would refuse: a wide job queues long to be told."""
    if refused := errors(pair_rules.check_recipe(recipe)):
        raise ConfigError("\n".join(map(str, refused)))
    return recipe


def plan(recipe: Recipe, options: argparse.Namespace) -> list[str]:
    """Return the command. Raises ConfigError for a recipe that has no engine, or several, of more than one node."""
    stage, world, gpus = spanning_engine(recipe, options.gpus_per_node)
    if world % gpus:
        raise ConfigError(f"workers.{stage}: {world} GPUs don't fill nodes of {gpus}; give --gpus-per-node")
    serve = [*leader(recipe), *options.serve_arguments]
    check_words(serve)
    if options.launcher == "srun":
        nodes = ["--nodes", str(world // gpus), "--ntasks", str(world), "--ntasks-per-node", str(gpus)]
        return ["srun", "--mpi", "pmix", *nodes, "--kill-on-bad-exit=1", *serve]
    return ["mpirun", "-np", str(world), *mpirun_hosts(options.hosts, world, gpus), *mpirun_variables(), *serve]


def spanning_engine(recipe: Recipe, gpus_per_node: int) -> tuple[str, int, int]:
    """Return the stage of the one engine that needs more than a node, its GPUs, and the GPUs of a node."""
    found = []
    for stage, entry in recipe.workers.items():
        yaml = Yaml(prepared(entry.engine_config.llm_args), stage, "1.2", is_disaggregated=False)
        gpus = gpus_per_node or int(yaml.number("gpus_per_node", GPUS_PER_NODE))
        if entry.kind.has_llm_args and yaml.world_size > gpus:
            found.append((stage, yaml.world_size, gpus))
    if not found:
        raise ConfigError(
            f"every engine of {recipe.name} fits a node: TensorRT-LLM starts its ranks itself;"
            f" run python tools/serve.py {recipe.folder}"
        )
    if len(found) > 1:
        stages = " and ".join(stage for stage, _, _ in found)
        raise ConfigError(
            f"{stages} of {recipe.name} both span nodes; one server drives one such engine: lower their parallel sizes"
            " to one node each, serve the model aggregated, or give --discovery: then each has a server of its own"
        )
    return found[0]


@dataclass(frozen=True, slots=True)
class ServerPart:
    """One of several servers of a recipe."""

    stage: str  # whose workers it has
    replicas: int
    num_gpus: int  # of each
    num_nodes: int
    gpus_per_node: int

    @property
    def spans_nodes(self) -> bool:
        return self.num_nodes > 1

    @property
    def num_tasks(self) -> int:
        """One a GPU where TensorRT-LLM's ranks must be started for it; else serve.py alone."""
        return self.num_gpus if self.spans_nodes else 1


def server_plans(recipe: Recipe, options: argparse.Namespace) -> list[list[str]]:
    """Return a command for each server. Raises ConfigError."""
    parse_address(options.discovery)
    if "://" in options.discovery and not os.environ.get("BIREME_KEY"):
        raise ConfigError("BIREME_KEY: not set; all servers must have one key: `openssl rand -hex 32` makes one")
    commands, first = [], 0
    hosts = options.hosts.split(",") if options.hosts else []
    parts = server_parts(recipe, options.gpus_per_node)
    needed = sum(part.num_nodes for part in parts)
    if hosts and len(hosts) != needed:
        raise ConfigError(f"--hosts: {len(hosts)} nodes; the servers of {recipe.name} take {needed}")
    if options.launcher == "mpirun" and not hosts:
        raise ConfigError(f"--hosts: missing; name {needed} nodes, so that each server has nodes of its own")
    for part in parts:
        serve = part_command(recipe, part, options)
        tasks = part.num_tasks // part.num_nodes
        if options.launcher == "srun":
            place = ["--relative", str(first), "--nodes", str(part.num_nodes), "--ntasks", str(part.num_tasks)]
            place += ["--ntasks-per-node", str(tasks), "--kill-on-bad-exit=1"]
            commands.append(["srun", "--mpi", "pmix", *place, *serve])
        else:
            own = ",".join(f"{name}:{tasks}" for name in hosts[first : first + part.num_nodes])
            commands.append(["mpirun", "-np", str(part.num_tasks), "--host", own, *mpirun_variables(), *serve])
        first += part.num_nodes
    return commands


def server_parts(recipe: Recipe, gpus_per_node: int) -> list[ServerPart]:
    """Return the servers: one an engine that spans nodes, one a node for those of which several fit."""
    parts: list[ServerPart] = []
    for stage in ("prefill", "decode"):
        if (entry := recipe.workers.get(stage)) is None:
            continue
        if "prefill" in recipe.workers and not entry.kind.moves_own_kv:
            raise ConfigError(
                f"workers.{stage}.engine: {entry.engine}; its KV goes through the shared memory of one host, use"
                " engine: trtllm to have prefill and decode on nodes of their own"
            )
        yaml = Yaml(prepared(entry.engine_config.llm_args), stage, "1.2", is_disaggregated=False)
        gpus, world = gpus_per_node or int(yaml.number("gpus_per_node", GPUS_PER_NODE)), yaml.world_size
        if world > gpus and world % gpus:
            raise ConfigError(f"workers.{stage}: {world} GPUs don't fill nodes of {gpus}; give --gpus-per-node")
        left, most = entry.replicas, max(1, gpus // world)
        while left > 0:
            parts.append(ServerPart(stage, min(left, most), world, max(1, world // gpus), gpus))
            left -= most
    if not parts:
        raise ConfigError(f"{recipe.name} has neither prefill nor decode; run python tools/serve.py {recipe.folder}")
    return parts


def part_command(recipe: Recipe, part: ServerPart, options: argparse.Namespace) -> list[str]:
    """Return what each task of a server runs; other servers have the other stage."""
    settings = [f"workers.{part.stage}.replicas={part.replicas}"]
    settings += [
        f"workers.{name}.replicas=0" for name in ("prefill", "decode") if name in recipe.workers.keys() - {part.stage}
    ]
    serve = [sys.executable, str(CHECKOUT / "tools" / "serve.py"), recipe.folder]
    if part.spans_nodes:
        serve = leader(recipe)
    serve += ["--discovery", options.discovery, *(word for setting in settings for word in ("--set", setting))]
    if not any(word.startswith(("--grpc-host", "--triton-host")) for word in options.serve_arguments):
        raise ConfigError(
            "--grpc-host: missing; servers reach each other by gRPC: name the network of the nodes after --, as in"
            " -- --grpc-host 10.1.0.0/16"
        )
    serve += options.serve_arguments
    check_words(serve)
    return serve


def leader(recipe: Recipe) -> list[str]:
    server = [sys.executable, str(CHECKOUT / "tools" / "serve.py"), recipe.folder]
    return ["trtllm-llmapi-launch", *server, "--set", "supervisor.max_restarts=0"]


def check_words(words: list[str]) -> None:
    for word in words:
        if any(character.isspace() for character in word) or not word:
            raise ConfigError(
                f"{word!r}: trtllm-llmapi-launch splits its command at blanks; write it without any (JSON and YAML"
                " need none), or put it in the recipe"
            )


def mpirun_hosts(hosts: str, world: int, gpus: int) -> list[str]:
    if not hosts:
        return ["--map-by", f"ppr:{gpus}:node"]
    names = hosts.split(",")
    if len(names) != world // gpus:
        raise ConfigError(f"--hosts: {len(names)} nodes; {world} GPUs at {gpus} a node are {world // gpus}")
    return ["--host", ",".join(f"{name}:{gpus}" for name in names)]


def mpirun_variables() -> list[str]:
    return [part for name in PASSED_ON if name in os.environ for part in ("-x", name)]


if __name__ == "__main__":
    sys.exit(main())
