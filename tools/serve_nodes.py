"""Serve a recipe whose TensorRT-LLM engine spans several nodes: the command that starts its ranks.

    python tools/serve_nodes.py recipes/deepseek-r1-wide-ep --dry-run
    python tools/serve_nodes.py recipes/deepseek-r1-wide-ep --with mpirun --hosts node1,node2,node3,node4 --dry-run
    srun ... or salloc ... first; then:  python tools/serve_nodes.py recipes/deepseek-r1-wide-ep -- --host 0.0.0.0

One task a GPU runs `trtllm-llmapi-launch python tools/serve.py RECIPE`: rank 0 becomes the server (the leader), all
others TensorRT-LLM's workers. What follows `--` goes to serve.py. An engine that fits one node needs none of this:
TensorRT-LLM starts its ranks itself, and the program says so. --dry-run prints the command; without it, it is run.

A rank that has died takes its MPI world along, so the engine is not started again (supervisor.max_restarts 0): the
job ends, and Slurm's --requeue or the operator starts it again.

Exit codes: the command's; 2 when the recipe can't be served this way.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT, Recipe
from bireme.engines.trtllm import pair_rules
from bireme.engines.trtllm.config import prepared
from bireme.engines.trtllm.problems import errors
from bireme.engines.trtllm.rules import Yaml
from bireme.errors import ConfigError
from bireme.recipe_files import load_recipe

WRONG = 2
GPUS_PER_NODE = 8
# Open MPI hands only named variables on to other nodes.
PASSED_ON = ("HF_TOKEN", "HF_HOME", "TLLM_LOG_LEVEL", "NCCL_MNNVL_ENABLE", "UCX_TLS", "UCX_NET_DEVICES", "PATH")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        command = plan(checked(load_recipe(options.recipe)), options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return WRONG
    print(shlex.join(command))
    if options.dry_run:
        return 0
    sys.stdout.flush()
    os.execvp(command[0], command)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("serve_arguments", nargs="*", metavar="-- SERVE_ARGUMENT", help="for serve.py")
    parser.add_argument("--with", dest="launcher", choices=("srun", "mpirun"), default="srun")
    parser.add_argument("--gpus-per-node", type=int, default=0, help="default: the YAML's gpus_per_node, else 8")
    parser.add_argument("--hosts", default="", metavar="A,B", help="with mpirun: the nodes; the first runs the server")
    parser.add_argument("--dry-run", action="store_true", help="print the command only")
    return parser.parse_args(arguments)


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
            " to one node each, or serve the model aggregated"
        )
    return found[0]


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
