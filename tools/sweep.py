"""Measure recipes over workers, lengths and loads, and report what a GPU and a user get: aggregated or disaggregated?

    python tools/sweep.py recipes/mocker recipes/mocker-disagg --concurrency 1,4,16
    python tools/sweep.py recipes/mocker recipes/mocker-disagg --workers 2,1:1 --lengths 64/8,8/64 --concurrency 4,32
    python tools/sweep.py recipes/tiny-chat --lengths 64/32 --rates 1,4 --loads bireme --rate-seconds 10 --repeats 3
    python tools/sweep.py recipes/tiny-chat --vary workers.decode.engine_config.max_batch_size=8,32 --concurrency 8
    python tools/sweep.py --matrix sweep.yaml --out night
    python tools/sweep.py --resume night

Each deployment is launched by serve.py on loopback, one at a time, and all of its cells are measured in that launch. A
plan is shown first; --plan stops there. The folder of --out gets a JSON for each run, results.json, report.html and
report.png. A cell that fails stands there with its reason, and the sweep goes on. Ctrl-C ends the launch and reports
what is measured; --resume goes on with the cells that are not. docs/sizing.md has the YAML of --matrix.

Exit codes: 0 all is measured; 1 a cell has failed; 2 an option, a recipe or something that a load needs is wrong or
missing; 130 stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from bireme.errors import ConfigError
from bireme.stop_signals import on_stop_signal
from tools import clients
from tools.sweeping import loads, report
from tools.sweeping.gpus import Clocks
from tools.sweeping.launch import Stop, StoppedError
from tools.sweeping.matrix import CHANGEABLE, Cell, Plan, make_plan, read_matrix
from tools.sweeping.results import Results, this_machine
from tools.sweeping.runner import Estimate, Sweep, settle

GOOD, FAILED, WRONG, STOPPED = 0, 1, 2, 130
_LISTS = {"lengths": str, "concurrency": int, "rates": float, "loads": str}  # options of the matrix
_VALUES: dict[str, tuple[type, str]] = {
    "requests_per_stream": (int, "measured for each request under way; default 10"),
    "warmup_per_stream": (int, "sent before, for each request under way; default 2"),
    "rate_seconds": (float, "of requests at a rate; default 30"),
    "repeats": (int, "of every cell, in turns; default 1"),
    "ttft_ms": (float, "of nine of ten requests: a cell beyond does not count for the fronts; default: any does"),
    "itl_ms": (float, "the same of the mean gap between a request's tokens"),
    "ready_timeout_s": (float, "for a launch to come up; default 600"),
    "cell_timeout_s": (float, "for one load; default 900"),
    "gpu_clock_mhz": (int, "locked while the sweep runs, where nvidia-smi may; default: as it is"),
    "seed": (int, "of the first cell's prompts; default 100"),
    "expect_itl_ms": (float, "of a token, for the first estimate of minutes alone; default 20"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        results, plan = opened(options)
        show(plan, results)
        if options.plan:
            return GOOD
        if options.resume:
            results.claim()
            results.keep(plan)
        for load in dict.fromkeys(cell.load for cell in results.left(plan)):
            if not loads.is_made(load):
                say(f"{load}: put into {clients.ENVIRONMENTS / load}, which takes minutes at the first time")
            loads.prepare(load)
        if not options.resume:
            results.begin(plan)
    except ConfigError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:  # nothing is measured yet
        return STOPPED
    stop = Stop()

    def end(number: int) -> None:
        say(
            "stopping: the launch ends what is under way; again, and it does not" if not stop.is_set else "stopping now"
        )
        stop.set()

    with on_stop_signal(end):
        return measured(plan, results, stop)


def opened(options: argparse.Namespace) -> tuple[Results, Plan]:
    """Return the folder and its plan, checked. Raises ConfigError."""
    if options.resume:
        results = Results(Path(options.resume))
        given = {name: getattr(options, name) for name in CHANGEABLE if getattr(options, name) is not None}
        return results, results.plan().changed(**given)
    results = Results(Path(options.out or time.strftime("out/sweep-%Y%m%d-%H%M%S")))
    plan = make_plan(tree_of(options), options.matrix or "options")
    for deployment in plan.deployments:
        settle(deployment)
    results.check_new()
    return results, plan


def measured(plan: Plan, results: Results, stop: Stop) -> int:
    """Measure what is left, write the report, and return the exit code."""
    clocks = Clocks(plan.matrix.gpu_clock_mhz)
    is_stopped = False
    clocks.lock()
    say(f"GPU clocks: {clocks.told}")
    try:
        Sweep(plan, results, clocks, stop, say).run()
    except StoppedError:
        is_stopped = True
    finally:
        clocks.unlock()
    runs = results.read_all(plan)
    machine = this_machine() | {"gpu_clocks": clocks.told}
    summary = results.write_summary(runs, machine)
    conditions = [f"Machine: {machine['system']}, {machine['cores']} cores. GPU clocks: {clocks.told}."]
    page, no_picture = report.write_report(results.folder, plan, runs, conditions)
    if no_picture:
        say(f"no picture: {no_picture}")
    for lengths in dict.fromkeys(cell.lengths for cell in plan.cells):
        for sentence in report.comparison(plan, runs, lengths):
            print(f"{lengths} {sentence}")
    for sentence in (report.trust(runs), *report.agreement(runs, plan.matrix.loads)) if runs else ():
        print(sentence)
    num_failed = sum(run.state == "failed" for run in runs)
    num_left = len(plan.cells) - len(runs)
    if num_left:
        say(
            f"stopped, {num_left} of {counted(plan.cells)} left;"
            f" python tools/sweep.py --resume {results.folder} goes on"
        )
    print(json.dumps({
        "sweep": str(summary), "report": str(page), "cells": len(plan.cells), "measured": len(runs) - num_failed,
        "failed": num_failed, "left": num_left,
    }))  # fmt: skip
    return STOPPED if is_stopped else FAILED if num_failed else GOOD


def show(plan: Plan, results: Results) -> None:
    """Print what will be measured, and how long that may take."""
    left = results.left(plan)
    for deployment in plan.deployments:
        cells = plan.cells_of(deployment)
        settings = f", {' '.join(deployment.settings)}" if deployment.settings else ""
        print(f"{deployment.name}: {deployment.kind}, {counted(cells)}{settings}")
    for lengths in dict.fromkeys(cell.lengths for cell in plan.cells):
        pressures = dict.fromkeys(cell.pressure for cell in plan.cells if cell.lengths == lengths)
        print(f"  {lengths} tokens: {', '.join(pressures)}")
    minutes = Estimate(plan.matrix.expect_itl_ms).minutes(left)
    done = f", {len(plan.cells) - len(left)} measured already" if len(left) < len(plan.cells) else ""
    print(
        f"{counted(plan.cells)} by {' and '.join(plan.matrix.loads)}{done}; about {minutes:.1f} min where a token"
        f" takes {plan.matrix.expect_itl_ms:g} ms; results in {results.folder}"
    )


def counted(cells: Sequence[Cell]) -> str:
    return f"{len(cells)} cell{'s' if len(cells) != 1 else ''}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tree_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the matrix: that of the file, with what the command line says over it. Raises ConfigError."""
    tree = read_matrix(options.matrix) if options.matrix else {}
    deployments = [deployment_of(recipe, options) for recipe in options.recipes]
    if deployments:
        tree["deployments"] = deployments
    elif options.set or options.vary or options.workers:
        raise ConfigError("--set, --vary and --workers are of recipes on the command line; write them into the YAML")
    tree.setdefault("deployments", [])
    for name, kind in _LISTS.items():
        if (text := getattr(options, name)) is not None:
            tree[name] = [_converted(name, kind, part) for part in text.split(",")]
    for name in _VALUES:
        if (value := getattr(options, name)) is not None:
            tree[name] = value
    return tree


def deployment_of(recipe: str, options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError."""
    values = dict(_key_value("--set", text) for text in options.set)
    vary = {key: text.split(",") for key, text in (_key_value("--vary", text) for text in options.vary)}
    return {
        "recipe": recipe,
        "set": {key: _plain(text) for key, text in values.items()},
        "vary": {key: [_plain(text) for text in texts] for key, texts in vary.items()},
        "workers": options.workers.split(",") if options.workers else [],
    }


def _key_value(option: str, text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key or not value:
        raise ConfigError(f"{option} {text}: write KEY=VALUE, as in workers.decode.replicas=2")
    return key, value


def _plain(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is not a YAML value: {error}") from error


def _converted(name: str, kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"--{name}: {text!r} is no {kind.__name__}; write values with commas between them") from error


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="folders with recipe.yaml")
    parser.add_argument("--matrix", metavar="FILE", help="YAML with all that follows, and more for each recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over each recipe; may repeat")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=A,B", help="a deployment for each value")
    parser.add_argument(
        "--workers",
        metavar="N,P:D",
        help="of aggregated recipes N, of disaggregated ones P for prefill and D for decode",
    )
    parser.add_argument("--lengths", metavar="P/A,P/A", help="tokens of prompt and answer; default 512/128")
    parser.add_argument("--concurrency", metavar="N,N", help="requests under way at any time")
    parser.add_argument("--rates", metavar="R,R", help="requests a second, at random times")
    parser.add_argument("--loads", metavar="NAME,NAME", help="aiperf, bireme; default both")
    for name, (kind, meaning) in _VALUES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=meaning)
    parser.add_argument("--out", metavar="FOLDER", help="of the results; default: a new one in out/")
    parser.add_argument("--resume", metavar="FOLDER", help="go on with the sweep that is there")
    parser.add_argument("--plan", action="store_true", help="show the plan and measure nothing")
    options = parser.parse_args(arguments)
    fixed = ("recipes", "matrix", "out", "set", "vary", "workers", *_LISTS, *(_VALUES.keys() - set(CHANGEABLE)))
    given = [name.replace("_", "-") for name in fixed if getattr(options, name) not in (None, [])]
    if options.resume and given:
        parser.error(f"--resume goes on with the plan that is there; leave out {', '.join(given)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
