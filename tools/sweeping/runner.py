"""Goes over the cells of a plan: a launch for each deployment, one at a time, with all of its cells in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from bireme.config import Recipe
from bireme.errors import BiremeError
from bireme.launch.override import add_settings
from bireme.recipe_files import load_recipe
from tools.sweeping import gpus, loads
from tools.sweeping.gpus import Clocks, Share
from tools.sweeping.launch import Launch, LaunchFailedError, Stop, Wait, last_lines, run_load, started
from tools.sweeping.loads import LoadFailedError
from tools.sweeping.matrix import Cell, Deployment, Plan
from tools.sweeping.results import Results, Run

_LAUNCH_S = 20.0  # to come up and to end, until one has been seen
_START_S = {"aiperf": 12.0, "bireme": 2.0}  # of a load itself
Say = Callable[[str], None]


class Estimate:
    """How long what is left will take: as `expect_itl_ms` has it, corrected by what has been measured."""

    def __init__(self, itl_ms: float) -> None:
        self._itl_ms = itl_ms
        self._cells: list[float] = []  # seconds measured over those expected
        self._launches: list[float] = []

    def saw_cell(self, cell: Cell, seconds: float) -> None:
        self._cells.append(seconds / self._plain_s(cell))

    def saw_launch(self, seconds: float) -> None:
        self._launches.append(seconds)

    def _plain_s(self, cell: Cell) -> float:
        return cell.expected_s(self._itl_ms) + _START_S[cell.load]

    def minutes(self, cells: Sequence[Cell]) -> float:
        factor = statistics.fmean(self._cells) if self._cells else 1.0
        launch_s = statistics.fmean(self._launches) if self._launches else _LAUNCH_S
        num_launches = len({cell.deployment for cell in cells})
        return (sum(map(self._plain_s, cells)) * factor + num_launches * launch_s) / 60


class Sweep:
    """One pass over the cells that have not been measured."""

    def __init__(self, plan: Plan, results: Results, clocks: Clocks, stop: Stop, say: Say) -> None:
        self._plan, self._results, self._clocks, self._stop, self._say = plan, results, clocks, stop, say
        self._began_at = _now()
        self._left = results.left(plan)
        self.estimate = Estimate(plan.matrix.expect_itl_ms)

    def run(self) -> None:
        """Measure all that is left; a cell that can't be is saved with its reason. Raises StoppedError."""
        for deployment in self._plan.deployments:
            while cells := [cell for cell in self._left if cell.deployment == deployment.name]:
                self._launch(deployment, cells)

    def _launch(self, deployment: Deployment, cells: Sequence[Cell]) -> None:
        """Start a deployment and measure in it until a cell spoils it; where it does not come up, all cells fail."""
        began = time.monotonic()
        self._say(f"{deployment.name}: starting")
        try:
            settings, recipe = settle(deployment)
            with started(deployment, recipe, settings, self._results.logs, self._stop) as launch:
                launch.wait_ready(self._plan.matrix.ready_timeout_s, self._wait(f"{deployment.name}, starting"))
                launch.try_answer(is_chat="aiperf" in self._plan.matrix.loads)
                document = launch.document()
                share = gpus.share_of(document, recipe)
                self.estimate.saw_launch(time.monotonic() - began)
                base = Run(
                    cell=cells[0], deployment=deployment, state="failed", share=share,
                    commit=str(document["versions"].get("commit", "")), launch_settings=settings,
                )  # fmt: skip
                for cell in cells:
                    if not self._measure(cell, launch, base):
                        return
        except (LaunchFailedError, BiremeError, OSError) as error:
            for cell in cells:
                if cell in self._left:
                    self._save(Run(cell=cell, deployment=deployment, state="failed", reason=f"launch: {error}"))

    def _measure(self, cell: Cell, launch: Launch, base: Run) -> bool:
        """Save the cell's run; return whether the launch is good for the next."""
        share, began = base.share, time.monotonic()
        assert share is not None
        known = msgspec.structs.replace(base, cell=cell, began_at=_now())
        folder = self._results.new_load_folder(cell)
        is_good = True
        command = loads.command(cell, launch.target, folder)
        known = msgspec.structs.replace(known, command=tuple(command))
        try:
            wait, matrix = self._wait(cell.name), self._plan.matrix
            launch.wait_ready(matrix.ready_timeout_s, wait)
            stdout = run_load(command, folder / "load.log", matrix.cell_timeout_s, launch.has_ended, wait)
            figures, tool = loads.read(cell, folder, stdout)
            run = msgspec.structs.replace(
                known, state="measured", figures=figures, tool=tool,
                tokens_per_s_per_gpu=figures.tokens_per_s / share.count,
            )  # fmt: skip
            self.estimate.saw_cell(cell, time.monotonic() - began)
        except (LoadFailedError, ChildProcessError) as error:  # it has ended by itself: nothing of it is under way
            reason = f"load: {loads.request_errors(folder) or error}"
            run, is_good = msgspec.structs.replace(known, reason=reason), launch.is_ready()
        except TimeoutError as error:
            run, is_good = msgspec.structs.replace(known, reason=f"load: {error}"), False
        except LaunchFailedError as error:
            run, is_good = msgspec.structs.replace(known, reason=f"launch: {error}: {last_lines(launch.log)}"), False
        clock = self._clocks.now()
        self._save(msgspec.structs.replace(run, seconds=round(time.monotonic() - began, 1), clock=clock))
        return is_good

    def _wait(self, what: str) -> Wait:
        return Wait(self._stop, what, self._say)

    def _save(self, run: Run) -> None:
        run = msgspec.structs.replace(run, sweep_began_at=self._began_at)
        self._results.save(run)
        self._left.remove(run.cell)
        total = len(self._plan.cells)
        told = f"[{total - len(self._left)}/{total}] {run.cell.name}: {outcome(run)}"
        left = f"; about {self.estimate.minutes(self._left):.1f} min left" if self._left else ""
        self._say(told + left)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def settle(deployment: Deployment) -> tuple[tuple[str, ...], Recipe]:
    """Return the settings of a launch, with GPUs for its engines where --workers asked for them, and its recipe.

    Raises ConfigError.
    """
    settings = deployment.settings
    recipe = load_recipe(deployment.recipe, add_settings("", settings))
    if deployment.placed:
        settings = (*settings, *gpus.placement(recipe, gpus.num_gpus()))
        recipe = load_recipe(deployment.recipe, add_settings("", settings))
    return settings, recipe


def outcome(run: Run) -> str:
    """Say in a line what came of a cell."""
    if run.figures is None or run.tokens_per_s_per_gpu is None:
        return f"FAILED, {run.reason}"
    unit = run.share.unit if run.share else Share(1, "GPU").unit
    user = run.figures.tokens_per_s_per_user_p50
    seen = f", {user:,.1f} a user" if user is not None else ""
    return f"{run.tokens_per_s_per_gpu:,.1f} tokens/s a {unit}{seen}"
