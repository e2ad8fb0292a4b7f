"""Size a deployment that runs: once an interval, decide how many prefill and decode workers there should be, and act.

    python tools/plan.py --advise --admin http://127.0.0.1:8004 --recipe recipes/mocker-disagg
    python tools/plan.py --admin http://127.0.0.1:8004 --settings planner.yaml --times h100-8b-bf16
    python tools/plan.py --kubernetes qwen3.llm --settings planner.yaml --times h100-8b-bf16 --log decisions.jsonl

With --advise nothing is changed. Without it workers of the launch that are not needed sleep, and are waked when they
are: serve it with as many replicas as there may ever be. With --start more launches of one worker each begin and end
instead, found by discovery; with --slurm they are jobs. In Kubernetes replicas of Deployments or LeaderWorkerSets
follow (docs/kubernetes.md).

--settings names a YAML file (docs/sizing.md): the target, bounds, the budget. It may change while the planner runs.
What can't be believed changes nothing: the planner holds, and says why. Ctrl-C or SIGTERM ends it and leaves the
deployment as it is.

Exit codes: 0 ended as asked; 2 an option or setting is wrong, or the deployment can't be planned.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import MockerConfig, Recipe
from bireme.errors import BiremeError, ConfigError
from bireme.launch.admin_client import DoorClient, add_door_options, door_of
from bireme.launch.override import add_settings
from bireme.launch.ports import LOOPBACK, host_in
from bireme.planner.aggregated import AggregatedPlanner
from bireme.planner.capacity import PlannedEngine
from bireme.planner.planner import WorkerPlanner
from bireme.planner.planner_settings import PlannerSettings
from bireme.planner.predictors import Predictor, PredictorName, make_predictor
from bireme.recipe_files import load_recipe
from bireme.scaling.connector import AGGREGATED, STAGES, Connector
from bireme.scaling.extra_launches import ExtraLaunches
from bireme.scaling.kubernetes_workloads import KubernetesTarget, KubernetesWorkloads
from bireme.scaling.observer import LiveObserver
from bireme.scaling.page_figures import WorkerLevels
from bireme.scaling.plan_record import DecisionLog, PlanRecord
from bireme.scaling.planner_file import PlannerFile
from bireme.scaling.planner_loop import PlannerLoop, Teller
from bireme.scaling.planner_metrics import PlannerMetrics
from bireme.scaling.sleeping_workers import SleepingWorkers
from bireme.scaling.slurm_jobs import SlurmJobs
from bireme.sizing.step_times import StepTimes, published
from bireme.stop_signals import on_stop_signal
from tools import make_sbatch

ENDED, WRONG = 0, 2
_NOTE_S = 2.0  # for the live view, which may miss one


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    stopping = threading.Event()
    with on_stop_signal(lambda number: stopping.set()):
        return plan(options, stopping)


def plan(options: argparse.Namespace, stopping: threading.Event) -> int:
    """Return the exit code."""
    log, metrics = None, None
    try:
        settings_file = PlannerFile(Path(options.settings)) if options.settings else None
        settings = (settings_file.changed() if settings_file else None) or PlannerSettings()
        settings.check()
        times = step_times(options, settings)
        predictor = make_predictor(options.predictor)
        log = decision_log(options.log) if options.log else None
        if options.metrics_port is not None:
            metrics = PlannerMetrics(host_in(options.metrics_host), options.metrics_port)
            metrics.start()
        connector = connector_of(options)
        observer = LiveObserver(connector, settings.interval_s, stages=stages_of(options))
        awaken = None if options.advise else connector
        engines = wait_for_engines(observer, times, options.wait, stopping, awaken, settings)
        if engines is None:
            return ENDED
        tellers: list[Teller] = [tell, *([log.write] if log is not None else [])]
        if metrics is not None:
            tellers.append(metrics.count)
        if (door := door_of(options)) is not None:
            notes = dataclasses.replace(door, timeout_s=_NOTE_S)
            tellers.append(lambda record: note_at(notes, record))
        planner = planner_of(settings, engines, predictor)
        loop = PlannerLoop(
            planner, observer, connector, tellers, acts=not options.advise, settings_file=settings_file,
            complain=complain,
        )  # fmt: skip
        complain(f"watching; a decision each {settings.interval_s:g} s, the first one after that")
        loop.run(settings.interval_s, options.intervals, stopping)
    except (BiremeError, OSError) as error:
        complain(str(error))
        return WRONG
    finally:
        if log is not None:
            log.close()
        if metrics is not None:
            metrics.stop()
    return ENDED


def decision_log(path: str) -> DecisionLog:
    """Raises ConfigError."""
    try:
        return DecisionLog(Path(path))
    except OSError as error:
        raise ConfigError(f"--log {path}: it can't be written ({error.strerror}); name another file") from error


def stages_of(options: argparse.Namespace) -> Sequence[str]:
    return AGGREGATED if options.aggregated else STAGES


def planner_of(settings: PlannerSettings, engines: dict[str, PlannedEngine], predictor: Predictor) -> WorkerPlanner:
    """Raises ConfigError."""
    if "prefill" not in engines:
        return AggregatedPlanner(settings, engines["decode"], predictor)
    return WorkerPlanner(settings, engines["prefill"], engines["decode"], predictor)


def connector_of(options: argparse.Namespace) -> Connector:
    """Raises ConfigError."""
    stages = stages_of(options)
    if options.kubernetes:
        name, _, namespace = options.kubernetes.partition(".")
        return KubernetesWorkloads(
            KubernetesTarget(name=name, namespace=namespace, openai_key=_key(options.openai_key_file)), stages
        )
    if (door := door_of(options)) is None:
        raise ConfigError("--admin: missing; name the launch's admin door (serve.py --admin-port), or --kubernetes")
    if not options.start and not options.slurm:
        return SleepingWorkers(door)
    if not options.admin_key_file:
        raise ConfigError("--admin-key-file: missing; the launches beside it have doors with the same key")
    if options.slurm:
        return slurm_jobs(door, options)
    return ExtraLaunches(
        door, options.start, Path(options.launches), options.admin_key_file, options.first_slot, stages
    )


def slurm_jobs(door: DoorClient, options: argparse.Namespace) -> SlurmJobs:
    """Raises ConfigError."""
    words = shlex.split(options.slurm)
    given = make_sbatch.parse([*words, "--out", "-"])
    if not given.join or given.stage or given.apart or given.sweep or given.servers != 1:
        raise ConfigError(
            "--slurm: name the recipe and --join FOLDER, that of the launch's own job, without --stage, --apart,"
            " --sweep and --servers: each job has one worker"
        )

    def first_port(slot: int) -> int:
        return int(given.first_port) + make_sbatch.PORTS_A_SERVER * (slot + 1)  # the launch's own job has the first ten

    def admin_port(slot: int) -> int:
        return make_sbatch.admin_port(first_port(slot))

    def script(stage: str, slot: int) -> str:
        own = ["--stage", stage, "--first-port", str(first_port(slot)), "--out", "-"]
        return make_sbatch.job(make_sbatch.parse([*words, *own]))

    name = given.name or Path(given.recipe).name
    return SlurmJobs(door, name, script, admin_port, Path(options.launches), options.first_slot, stages_of(options))


def _key(path: str) -> str:
    try:
        return Path(path).read_text().strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--openai-key-file {path}: it can't be read ({error})") from error


def step_times(options: argparse.Namespace, settings: PlannerSettings) -> dict[str, StepTimes]:
    """Return those of each stage; {}: the target needs none. Raises ConfigError."""
    recipe = load_recipe(options.recipe, add_settings("", options.set)) if options.recipe else None
    if recipe is not None and (recipe.workers.get("prefill") is None) != bool(options.aggregated):
        remedy = "leave --aggregated out" if options.aggregated else "decode computes prompts as well: say --aggregated"
        raise ConfigError(f"--recipe {options.recipe}: it has {', '.join(recipe.workers)} workers; {remedy}")
    found = {}
    for stage, named in (("prefill", options.prefill_times or options.times), ("decode", options.times)):
        if stage not in stages_of(options):
            continue
        if named:
            found[stage] = StepTimes.read(named)
        elif recipe is not None and (of_mocker := mocker_times(recipe, stage)) is not None:
            found[stage] = of_mocker
    if len(found) < len(stages_of(options)) and settings.target != "load":
        raise ConfigError(
            f"--times: missing; the target {settings.target} sizes by step times: name a file or one of"
            f" {', '.join(published())} (docs/sizing.md), or a --recipe of mockers; target: load needs none"
        )
    return found


def mocker_times(recipe: Recipe, stage: str) -> StepTimes | None:
    """None: the stage's engine computes a model, so its steps take what they take."""
    entry = recipe.workers.get(stage)
    if entry is None or entry.kind.needs_model:
        return None
    return StepTimes.of_mocker(entry.engine_config.mocker)


def wait_for_engines(
    observer: LiveObserver,
    times: dict[str, StepTimes],
    limit_s: float,
    stopping: threading.Event,
    awaken: Connector | None,
    settings: PlannerSettings,
) -> dict[str, PlannedEngine] | None:
    """Return what each stage's workers tell that they can do; None: `stopping`. Raises ConfigError.

    `awaken`: by which one worker of each stage starts where there is none that could tell; None: nobody may.
    """
    deadline, told = time.monotonic() + limit_s, ""
    while not stopping.is_set():
        if (doubt := observer.observe().doubt) != told and doubt.startswith("missing"):
            complain(f"waiting: {doubt}")
            told = doubt
        levels = observer.engines()
        if others := observer.unplanned():
            raise ConfigError(f"--aggregated: this deployment has {', '.join(others)} workers, too; leave it out")
        if levels.keys() >= set(observer.stages):
            return {stage: engine_of(levels[stage], times.get(stage)) for stage in observer.stages}
        if awaken is not None:
            start_first(awaken, observer, settings)
        if time.monotonic() >= deadline:
            silent = ", ".join(stage for stage in observer.stages if stage not in levels)
            raise ConfigError(
                f"no {silent} worker has told what it can do in {limit_s:g} s ({doubt}); "
                + (
                    "prefill and decode are sized apart: where decode computes prompts as well, say --aggregated"
                    if levels
                    else "is it there? --wait gives it longer"
                )
            )
        stopping.wait(1.0)
    return None


def start_first(connector: Connector, observer: LiveObserver, settings: PlannerSettings) -> None:
    """Have one worker of each stage come where there is none: who sleeps tells nothing, and nobody else wakes it."""
    if (sizes := observer.sizes) is None or all(sizes[stage].num_workers for stage in observer.stages):
        return
    least = {stage: max(sizes[stage].num_workers, 1) for stage in observer.stages}
    if settings.gpus_of(least.get("prefill", 0), least["decode"]) > settings.max_gpus:
        return
    try:
        complain(f"no worker tells what it can do: {'; '.join(connector.scale(least))}")
    except BiremeError as error:
        complain(str(error))


def engine_of(levels: WorkerLevels, times: StepTimes | None) -> PlannedEngine:
    """`times`: None: the target asks for none."""
    assert None not in (levels.max_num_tokens, levels.max_batch_size, levels.kv_blocks, levels.block_tokens)
    kv_tokens = (levels.kv_blocks or 0) * (levels.block_tokens or 0)
    return PlannedEngine(
        times or StepTimes.of_mocker(MockerConfig()), int(levels.max_num_tokens or 0),
        int(levels.max_batch_size or 0), int(kv_tokens),
    )  # fmt: skip


def tell(record: PlanRecord) -> None:
    at = time.strftime("%H:%M:%S", time.localtime(record.at))
    print(f"{at} {'plan' if record.acts else 'advice'} {record.line()}", flush=True)


def note_at(door: DoorClient, record: PlanRecord) -> None:
    """Have the launch's live view show it. Raises BiremeError."""
    door.post("/plan", at=record.at, result=record.result, acts=record.acts, text=record.line()[:2000])


def complain(text: str) -> None:
    print(f"plan: {text}", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advise", action="store_true", help="say what should be done, and do nothing")
    parser.add_argument("--settings", default="", metavar="FILE", help="YAML: target, bounds, budget")
    parser.add_argument(
        "--aggregated", action="store_true", help="decode's workers compute prompts; there is no prefill"
    )
    parser.add_argument("--times", default="", metavar="NAME_OR_FILE", help="step times of the engines")
    parser.add_argument("--prefill-times", default="", metavar="NAME_OR_FILE", help="of prefill's, where they differ")
    parser.add_argument("--recipe", default="", metavar="FOLDER", help="whose mockers' step times are known")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over --recipe; may repeat")
    parser.add_argument("--predictor", choices=get_args(PredictorName), default="constant", help="of requests/s")
    parser.add_argument("--log", default="", metavar="FILE", help="to which each decision is appended, as JSON")
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="GET /metrics for Prometheus; default: no")
    parser.add_argument("--metrics-host", default=LOOPBACK, metavar="ADDRESS", help="where that listens")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="for the deployment to be there")
    parser.add_argument("--intervals", type=float, default=math.inf, metavar="N", help="end after so many decisions")
    parser.add_argument(
        "--start", default="", metavar="COMMAND",
        help="serve.py's with --discovery: launches of one worker each on this host, in place of workers that sleep;"
        " {slot} in it is a number that no other of them has",
    )  # fmt: skip
    parser.add_argument(
        "--slurm", default="", metavar="OPTIONS",
        help="tools/make_sbatch.py's, with --join: jobs of one worker each beside the launch's own job",
    )  # fmt: skip
    parser.add_argument("--first-slot", type=int, default=0, metavar="N", help="from which slots count")
    parser.add_argument(
        "--launches", default="launches", metavar="FOLDER", help="of --start: which run; also --slurm: their logs"
    )
    parser.add_argument(
        "--kubernetes", default="", metavar="NAME[.NAMESPACE]",
        help="what make_manifests.py --apart has written: replicas of its workloads in place of workers that sleep",
    )  # fmt: skip
    parser.add_argument("--openai-key-file", default="", metavar="FILE", help="by which frontends there show metrics")
    add_door_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
