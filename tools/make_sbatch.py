"""Write a Slurm job that serves a recipe: on one node, several servers that find each other, or engines over nodes.

    python tools/make_sbatch.py recipes/qwen3 --out job.sbatch && sbatch job.sbatch
    python tools/make_sbatch.py recipes/qwen3-disagg --servers 4 --network 10.1.0.0/16 --out job.sbatch
    python tools/make_sbatch.py recipes/deepseek-r1-disagg --apart --network 10.1.0.0/16 --out job.sbatch
    python tools/make_sbatch.py recipes/qwen3 --sweep workers.decode.engine_config.max_batch_size=16,64,256 \\
        --run 'python bench.py --url $BIREME_URL --out $BIREME_OUT' --out sweep.sbatch

--apart: prefill and decode on nodes of their own, and engines that span nodes (tools/serve_nodes.py has the steps). A
step that dies, a server that nobody answers for a minute, or a lost node has the job queued again, --restarts times at
most, once the others have drained. `scancel -b -s URG JOB` drains the servers by their admin doors, --drain seconds at
most, and then ends the job; so does the time limit. A plain scancel sends every process SIGTERM at once, and what is
under way is lost.

--join: several jobs are one deployment. The first has the whole recipe, and each with --stage one worker more, as
`tools/plan.py --slurm` starts and ends them.

--sweep makes a job array, a task for each combination of values. --run is what each task does once its servers are
ready, with its results in $BIREME_OUT; then the task ends.

Exit codes: 0; 2 the recipe can't be served so, or an option is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT, Recipe
from bireme.errors import ConfigError
from bireme.launch.override import add_settings
from bireme.recipe_files import load_recipe
from bireme.scaling.connector import STAGES
from tools import serve_nodes

WRONG = 2
PORTS_A_SERVER = 10
_ADMIN = 5  # of them, its door's
ADMIN_KEY = "admin.key"
_DRAIN_S, _END_S = 300, 60
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        script = job(options)
        if options.join:
            make_admin_key(options)
        Path(options.out).write_text(script)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return WRONG
    except OSError as error:
        print(f"--out {options.out}: can't be written ({error})", file=sys.stderr)
        return WRONG
    print(f"{options.out}: sbatch {options.out}")
    return 0


def job(options: argparse.Namespace) -> str:
    """Return the script. Raises ConfigError."""
    if not _TIME.fullmatch(options.time):
        raise ConfigError(f"--time {options.time}: write it as Slurm does: minutes, 2:00:00, 1-12:00:00 or UNLIMITED")
    tasks = sweep_of(options.sweep)
    for task in tasks or [()]:  # each is to be one that can be served
        recipe = load_recipe(options.recipe, add_settings("", [*options.set, *task]))
    servers = apart(recipe, options) if options.apart else alike(recipe, options)
    nodes = sum(one.num_nodes for one in servers)
    lines = ["#!/bin/bash", *header(options, nodes, len(tasks))]
    lines += ["", "set -u", f"cd {shlex.quote(str(CHECKOUT))}", *functions(options), *environment(options, tasks)]
    lines += ["", *(one.line() for one in servers), ""]
    lines += ["stand_by"] if nodes > 1 else []
    lines += ["wait_ready"]
    if options.run:
        lines += ['mkdir -p "$BIREME_OUT"', options.run, "code=$?", "end", "exit $code"]
    else:
        lines += ["supervise"]
    return "\n".join(lines) + "\n"


def sweep_of(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a task's settings each: every combination of the values."""
    axes = []
    for sweep in sweeps:
        key, _, values = sweep.partition("=")
        if not key or not all(values.split(",")):
            raise ConfigError(f"--sweep {sweep}: write KEY=VALUE,VALUE,...")
        axes.append([f"{key}={value}" for value in values.split(",")])
    return list(itertools.product(*axes)) if axes else []


class Step:
    """One server: its srun line."""

    def __init__(self, name: str, words: Sequence[str], first: int, num_nodes: int, ports: tuple[int, int]) -> None:
        """`first`: of its nodes, where its health and admin `ports` are. `name`: in the job's log."""
        self.name, self.words, self.first, self.num_nodes, self.ports = name, words, first, num_nodes, ports

    def line(self) -> str:
        return f"start {self.name} {self.first} {self.ports[0]} {self.ports[1]} {' '.join(map(_word, self.words))}"


def _word(word: str) -> str:
    """Quote it, but for the job's own variables."""
    return f'"{word}"' if "$" in word else shlex.quote(word)


def alike(recipe: Recipe, options: argparse.Namespace) -> list[Step]:
    """Each server has the whole recipe, on a node of its own."""
    if options.stage and not options.join:
        raise ConfigError("--stage: it serves nobody by itself; name --join, the folder of the servers that it joins")
    if (options.servers > 1 or options.join) and not options.network:
        raise ConfigError(
            "--network: missing; several servers reach each other by gRPC: name the network of the nodes, as in"
            " --network 10.1.0.0/16"
        )
    steps = []
    for number in range(options.servers):
        place = ["srun", "--exact", "--relative", str(number), "--nodes", "1", "--ntasks", "1", "--kill-on-bad-exit=1"]
        serve = [sys.executable, str(CHECKOUT / "tools" / "serve.py"), recipe.folder, *_shared(options, number)]
        if options.join:
            serve += ["--discovery", str(_joined(options) / "discovery"), "--grpc-host", options.network]
            serve += _only(options.stage, recipe)
        elif options.servers > 1:
            serve += ["--discovery", "$BIREME_SHARED", "--grpc-host", options.network]
        steps.append(Step(f"server-{number}", [*place, *serve, "${SETTINGS[@]}"], number, 1, _ports(options, number)))
    return steps


def apart(recipe: Recipe, options: argparse.Namespace) -> list[Step]:
    """As serve_nodes.py starts them."""
    if not options.network:
        raise ConfigError("--network: missing; name the network of the nodes, as in --network 10.1.0.0/16")
    given = argparse.Namespace(
        discovery=options.discovery or "$BIREME_SHARED", hosts="", gpus_per_node=options.gpus_per_node,
        launcher="srun", serve_arguments=["--grpc-host", options.network],
    )  # fmt: skip
    parts = serve_nodes.server_parts(serve_nodes.checked(recipe), options.gpus_per_node)
    steps, first = [], 0
    for number, part in enumerate(parts):
        words = [
            *("srun", *(() if part.num_tasks == 1 else ("--mpi", "pmix")), "--exact", "--relative", str(first)),
            *("--nodes", str(part.num_nodes), "--ntasks", str(part.num_tasks)),
            *("--ntasks-per-node", str(part.num_tasks // part.num_nodes), "--kill-on-bad-exit=1"),
            *serve_nodes.part_command(recipe, part, given),
            *_shared(options, number),
            "${SETTINGS[@]}",
        ]
        steps.append(Step(f"{part.stage}-{number}", words, first, part.num_nodes, _ports(options, number)))
        first += part.num_nodes
    return steps


def _shared(options: argparse.Namespace, number: int) -> list[str]:
    """Servers have unlike ports, since Slurm may put several on one machine."""
    names = ("http", "grpc", "metrics", "health", *(() if options.stage else ("openai",)))
    ports = [word for at, name in enumerate(names) for word in (f"--{name}-port", str(_port(options, number, at)))]
    hosts = [word for name in ("host", "health-host", "admin-host") for word in (f"--{name}", options.network)]
    door = ["--admin-port", str(_ports(options, number)[1]), "--admin-key-file", "$BIREME_SHARED/admin.key"]
    return [*ports, *(hosts if options.network else []), *door]


def _only(stage: str, recipe: Recipe) -> list[str]:
    """Return what has a server run no more than one worker of a stage; "": all of its recipe. Raises ConfigError."""
    if stage and stage not in recipe.workers:
        there = ", ".join(recipe.workers)
        raise ConfigError(
            f"--stage {stage}: {recipe.folder} has no {stage} workers, but {there}; where decode computes prompts as"
            " well, plan.py takes --aggregated"
        )
    replicas = [f"workers.{one}.replicas={int(one == stage)}" for one in STAGES if one in recipe.workers]
    return ["--openai-port", "0", *(word for setting in replicas for word in ("--set", setting))] if stage else []


def _joined(options: argparse.Namespace) -> Path:
    return Path(options.join).resolve()


def make_admin_key(options: argparse.Namespace) -> None:
    """Make the one of all servers that join, where there is none. Raises OSError."""
    folder = _joined(options)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(folder / ADMIN_KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def admin_port(first_port: int) -> int:
    """Return that of a job's first server."""
    return first_port + _ADMIN


def _ports(options: argparse.Namespace, number: int) -> tuple[int, int]:
    """Return those of health and the admin door."""
    return _port(options, number, 3), _port(options, number, _ADMIN)


def _port(options: argparse.Namespace, number: int, at: int) -> int:
    return int(options.first_port + PORTS_A_SERVER * number + at)


def header(options: argparse.Namespace, nodes: int, num_tasks: int) -> list[str]:
    lines = [
        f"#SBATCH --job-name={options.name or Path(options.recipe).name}",
        f"#SBATCH --nodes={nodes}",
        f"#SBATCH --time={options.time}",
        "#SBATCH --requeue",
        *(["#SBATCH --no-kill"] if nodes > 1 else []),  # what runs on the others when one is lost ends first
        f"#SBATCH --signal=B:URG@{options.drain + _END_S}",  # before the time limit
        f"#SBATCH --output={'%x-%A_%a.log' if num_tasks else '%x-%j.log'}",
        "#SBATCH --open-mode=append",
    ]
    if options.gpus_per_node:
        lines.append(f"#SBATCH --gpus-per-node={options.gpus_per_node}")
    if num_tasks:
        lines.append(f"#SBATCH --array=0-{num_tasks - 1}")
    return lines + [f"#SBATCH {flag}" for flag in options.sbatch]


def environment(options: argparse.Namespace, tasks: Sequence[tuple[str, ...]]) -> list[str]:
    settings = [f"'{' '.join(task)}'" for task in tasks] or ["''"]
    own = " ".join(f"--set {shlex.quote(setting)}" for setting in options.set)
    return [
        "# Servers of a job find each other in a folder that all nodes see, and have one key.",
        'BIREME_SHARED="${BIREME_SHARED:-$HOME/.bireme-jobs}/$SLURM_JOB_ID"',
        'rm -rf "$BIREME_SHARED"  # what a lost node has left',
        'mkdir -p -m 700 "$BIREME_SHARED"',
        *_keys(options),
        f"TASKS=({' '.join(settings)})",
        'TASK="${TASKS[${SLURM_ARRAY_TASK_ID:-0}]}"',
        f"SETTINGS=({own})",
        'for setting in $TASK; do SETTINGS+=(--set "$setting"); done',
        'export BIREME_OUT="$SLURM_SUBMIT_DIR/$SLURM_JOB_NAME-${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"',
        f'export BIREME_URL="http://${{NODES[0]}}:{_port(options, 0, 4)}/v1"',
    ]


def _keys(options: argparse.Namespace) -> list[str]:
    """Of servers that join others the folder of these has both: discovery makes one there."""
    if options.join:
        return [f'(umask 077 && cat {shlex.quote(str(_joined(options) / ADMIN_KEY))} > "$BIREME_SHARED/admin.key")']
    return [
        'export BIREME_KEY="${BIREME_KEY:-$(openssl rand -hex 32)}"',
        '(umask 077 && openssl rand -hex 32 > "$BIREME_SHARED/admin.key")',
    ]


def functions(options: argparse.Namespace) -> list[str]:
    text = _FUNCTIONS.format(
        restarts=options.restarts, patience=options.patience, drain=options.drain, python=shlex.quote(sys.executable)
    )
    return text.splitlines()


_FUNCTIONS = """\
STEPS=() NAMES=() HEALTH=() DOORS=() NODES=()
for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    NODES+=("$(scontrol show node "$name" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')")
done
# start NAME FIRST_NODE HEALTH_PORT ADMIN_PORT COMMAND...
start() {{
    NAMES+=("$1, first node ${{NODES[$2]}}")
    HEALTH+=("http://${{NODES[$2]}}:$3/health/ready")
    DOORS+=("http://${{NODES[$2]}}:$4")
    shift 4
    "$@" &
    STEPS+=($!)
}}
drain_all() {{
    for door in "${{DOORS[@]}}"; do
        {python} tools/drain.py --all --wait {drain} --admin "$door" --admin-key-file "$BIREME_SHARED/admin.key" &
        drains+=($!)
    done
    wait "${{drains[@]}}"
}}
# Requests under way end first. srun kills its step when it is told to end, and scancel every process of it.
end() {{
    trap '' URG
    drain_all
    kill -TERM "${{STEPS[@]}}" 2>/dev/null
    wait "${{STEPS[@]}}" 2>/dev/null
    rm -rf "$BIREME_SHARED"
}}
trap 'echo "bireme: told to end"; end; exit 0' URG
again() {{
    echo "bireme: $1"
    end
    requeue && exit 0
    exit 1
}}
requeue() {{
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
        echo "bireme: the job is queued again"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "bireme: {restarts} restarts are used up; sbatch it again once its nodes are well"
        return 1
    fi
}}
# With --no-kill Slurm leaves a job that has lost its first node, and this script with it, running: the last node sees
# to it that it is queued again.
stand_by() {{
    (while date +%s.%N >"$BIREME_SHARED/alive"; do sleep 5; done) 2>/dev/null &
    LOG=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *StdOut=//p')
    (
        unset "${{!SLURM_GPUS@}}"  # it needs none
        srun --exact --overlap --gres none --relative $((${{#NODES[@]}} - 1)) --nodes 1 --ntasks 1 bash -c \\
            "$(declare -p DOORS BIREME_SHARED LOG); $(declare -f stand_in drain_all requeue); stand_in"
    ) &
}}
stand_in() {{
    local sign last= silent=0
    exec >>"$LOG" 2>&1  # srun is on the first node
    while sleep 10; do
        sign=$(cat "$BIREME_SHARED/alive" 2>/dev/null) || return 0  # the job has ended
        silent=$((silent + 1))
        [ "$sign" = "$last" ] || silent=0
        last=$sign
        if [ "$silent" -ge 6 ]; then
            echo "bireme: the job's first node is lost"
            drain_all
            requeue || scancel "$SLURM_JOB_ID"
            return
        fi
    done
}}
# Set ENDED to the names of servers that have; 1 when there are none.
any_ended() {{
    ENDED=
    for at in "${{!STEPS[@]}}"; do
        kill -0 "${{STEPS[$at]}}" 2>/dev/null || ENDED+="${{ENDED:+; }}${{NAMES[$at]}}"
    done
    [ -n "$ENDED" ]
}}
wait_ready() {{
    for ((second = 0; second < {patience}; second++)); do
        any_ended && again "a server has ended before it was ready: $ENDED"
        ready=0
        for url in "${{HEALTH[@]}}"; do
            curl -sf -m 2 -o /dev/null "$url" && ready=$((ready + 1))
        done
        if [ "$ready" = "${{#HEALTH[@]}}" ]; then
            echo "bireme: ready, $BIREME_URL; to end it without losing a request: scancel -b -s URG $SLURM_JOB_ID"
            return
        fi
        sleep 1 &
        wait $!
    done
    again "not ready in {patience} s"
}}
supervise() {{
    declare -A silent=()
    while true; do
        sleep 5 &
        wait -n $! "${{STEPS[@]}}"
        any_ended && again "a server has ended: $ENDED (srun tells why above)"
        for at in "${{!STEPS[@]}}"; do  # a launcher of ranks may outlive its server
            curl -s -m 2 -o /dev/null "${{HEALTH[$at]}}" && silent[$at]=0 || silent[$at]=$((${{silent[$at]:-0}} + 1))
            [ "${{silent[$at]}}" -lt 12 ] || again "a server answers no more: ${{NAMES[$at]}}"
        done
    done
}}"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--servers", type=int, default=1, metavar="N", help="with the whole recipe each, on N nodes")
    parser.add_argument("--apart", action="store_true", help="prefill and decode on nodes of their own")
    parser.add_argument("--network", default="", metavar="CIDR", help="of the nodes, where servers listen")
    parser.add_argument(
        "--join",
        default="",
        metavar="FOLDER",
        help="that all nodes see: jobs that name it serve together, with one key",
    )
    parser.add_argument("--stage", choices=STAGES, default="", help="with --join: one worker of it and no frontend")
    parser.add_argument("--discovery", default="", metavar="ADDRESS", help="with --apart; default: a folder in $HOME")
    parser.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="asked of Slurm, too")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the recipe; may repeat")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=A,B", help="a task a value; may repeat")
    parser.add_argument("--run", default="", metavar="COMMAND", help="what a task does once its servers are ready")
    parser.add_argument("--first-port", type=int, default=8000, metavar="PORT", help="ten ports a server from here on")
    parser.add_argument("--drain", type=int, default=_DRAIN_S, metavar="S", help="for a job's last requests")
    parser.add_argument("--patience", type=int, default=3600, metavar="S", help="until all servers are ready")
    parser.add_argument("--restarts", type=int, default=5, metavar="N")
    parser.add_argument("--time", default="1-00:00:00", help="limit, as Slurm writes it")
    parser.add_argument("--name", default="", help="of the job; default: the recipe's")
    parser.add_argument("--sbatch", action="append", default=[], metavar="FLAG", help="--partition=..., may repeat")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
