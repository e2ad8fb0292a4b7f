"""What a sweep measures: deployments, each under every length and every load. All is checked before anything starts."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.errors import ConfigError
from bireme.launch.override import add_settings
from bireme.recipe_files import load_recipe
from bireme.settings import Duration, NotNegative, Positive, PositiveDuration, Settings

LoadName = Literal["aiperf", "bireme"]
Kind = Literal["aggregated", "disaggregated"]
_WORKERS = re.compile(r"\d+(:\d+)?")
_LENGTHS = re.compile(r"(\d+)/(\d+)")
_MAX_CELLS = 2000
CHANGEABLE = ("ready_timeout_s", "cell_timeout_s", "ttft_ms", "itl_ms")  # of a matrix, when its sweep goes on


class DeploymentSpec(Settings, frozen=True, kw_only=True):
    """A recipe and what is set over it; each value of `vary` makes a deployment of its own."""

    recipe: str
    name: str = ""  # in the report; "": the recipe's, with what varies
    set: dict[str, Any] = {}
    vary: dict[str, list[Any]] = {}
    workers: tuple[str | int, ...] = ()  # "2": two that do both; "1:2": one for prefill, two for decode


class Matrix(Settings, frozen=True, kw_only=True):
    """The YAML of --matrix."""

    deployments: tuple[DeploymentSpec, ...]
    lengths: tuple[str, ...] = ("512/128",)  # tokens of a prompt / of its answer
    concurrency: tuple[Positive, ...] = ()  # requests under way at any time
    rates: tuple[PositiveDuration, ...] = ()  # requests a second, at random times
    loads: tuple[LoadName, ...] = ("aiperf", "bireme")
    requests_per_stream: Positive = 10  # of concurrency: so many times as many are measured
    warmup_per_stream: NotNegative = 2
    repeats: Positive = 1  # of every cell, in turns
    rate_seconds: PositiveDuration = 30.0  # of requests at a rate
    ready_timeout_s: PositiveDuration = 600.0  # for a launch to come up
    cell_timeout_s: PositiveDuration = 900.0  # for one load
    gpu_clock_mhz: NotNegative = 0  # 0: as it is
    ttft_ms: Duration = 0.0  # a cell counts for the fronts if nine of ten requests keep this; 0: any does
    itl_ms: Duration = 0.0  # the same of the mean gap between a request's tokens
    seed: NotNegative = 100
    expect_itl_ms: Duration = 20.0  # for the estimate of minutes alone


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One launch: a recipe with its settings."""

    name: str
    recipe: str
    settings: tuple[str, ...]  # KEY=VALUE, of serve.py --set
    kind: Kind
    workers: dict[str, int]  # replicas, by stage
    placed: bool = False  # --workers has asked for them: engines get GPUs of their own

    @property
    def slug(self) -> str:
        return _slug(self.name)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one deployment."""

    deployment: str
    load: LoadName
    input_tokens: int
    output_tokens: int
    concurrency: int = 0  # 0: at a rate
    rate: float = 0.0  # requests a second
    requests: int
    warmup: int
    seed: int
    repeat: int = 1  # counts from 1

    @property
    def pressure(self) -> str:
        return f"{self.concurrency} under way" if self.concurrency else f"{self.rate:g} requests/s"

    @property
    def lengths(self) -> str:
        return f"{self.input_tokens}/{self.output_tokens}"

    @property
    def name(self) -> str:
        again = f", again {self.repeat}" if self.repeat > 1 else ""
        return f"{self.deployment}, {self.lengths}, {self.pressure}, {self.load}{again}"

    @property
    def slug(self) -> str:
        pressure = f"c{self.concurrency}" if self.concurrency else f"r{self.rate:g}"
        again = f"_{self.repeat}" if self.repeat > 1 else ""
        return f"{_slug(self.deployment)}_{self.input_tokens}x{self.output_tokens}_{pressure}_{self.load}{again}"

    def expected_s(self, itl_ms: float) -> float:
        """Return how long it takes where a token takes so long."""
        answer_s = self.output_tokens * itl_ms / 1e3
        if not self.concurrency:
            return (self.requests + self.warmup) / self.rate + answer_s
        return (self.requests + self.warmup) / self.concurrency * answer_s


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, in this order; it stands in the folder of results, so that --resume needs nothing else."""

    format: Literal["bireme.sweep_plan.v1"] = "bireme.sweep_plan.v1"
    matrix: Matrix
    deployments: list[Deployment]
    cells: list[Cell]

    def changed(self, **values: Any) -> Plan:
        """Return it with values of the matrix that change no cell (CHANGEABLE). Raises ConfigError."""
        tree = msgspec.to_builtins(self.matrix) | values
        return msgspec.structs.replace(self, matrix=convert(tree, Matrix, "options"))

    def cells_of(self, deployment: Deployment) -> list[Cell]:
        return [cell for cell in self.cells if cell.deployment == deployment.name]


def read_matrix(path: str) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--matrix {path}: can't be read ({error.strerror}); name a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--matrix {path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"--matrix {path}: a mapping with `deployments` is expected")
    return tree


def make_plan(tree: Mapping[str, Any], where: str) -> Plan:
    """Raises ConfigError that names the key, or the deployment, and the remedy."""
    matrix = convert(dict(tree), Matrix, where)
    if not matrix.deployments:
        raise ConfigError(f"{where}: no recipe; name at least one, as in recipes/mocker")
    if not matrix.concurrency and not matrix.rates:
        raise ConfigError(f"{where}: neither concurrency nor rates; give one, as in --concurrency 1,4,16")
    _check_lists(matrix, where)
    lengths = [_parse_lengths(text, where) for text in matrix.lengths]
    deployments = [one for spec in matrix.deployments for one in _deployments(spec, where)]
    _check_names(deployments)
    cells = list(_cells(matrix, deployments, lengths))
    if len(cells) > _MAX_CELLS:
        raise ConfigError(f"{where}: {len(cells)} cells; at most {_MAX_CELLS}, split the sweep")
    return Plan(matrix=matrix, deployments=deployments, cells=cells)


def _check_lists(matrix: Matrix, where: str) -> None:
    """Refuse what would measure nothing, or a cell twice. Raises ConfigError."""
    remedies = {"loads": "give aiperf, bireme or both", "lengths": "give PROMPT/ANSWER in tokens, as in 1024/128"}
    for name, remedy in remedies.items():
        if not getattr(matrix, name):
            raise ConfigError(f"{where}: {name}: empty; {remedy}")
    for name in ("lengths", "concurrency", "rates", "loads"):
        if twice := [value for value, count in Counter(getattr(matrix, name)).items() if count > 1]:
            raise ConfigError(
                f"{where}: {name}: {twice[0]} twice; leave one out, or give `repeats` to measure cells again"
            )
    for number, spec in enumerate(matrix.deployments):
        if plain := [count for count in spec.workers if isinstance(count, int)]:  # YAML reads 1:2 as 62
            raise ConfigError(
                f'{where}: deployments[{number}].workers: {plain[0]}; write it in quotes, as in "2" or "1:2"'
            )
        if empty := [key for key, values in spec.vary.items() if not values]:
            raise ConfigError(
                f"{where}: deployments[{number}].vary.{empty[0]}: empty; give its values, or leave it out"
            )


def _parse_lengths(text: str, where: str) -> tuple[int, int]:
    if not (found := _LENGTHS.fullmatch(str(text))):
        raise ConfigError(f"{where}: lengths: {text!r}; write PROMPT/ANSWER in tokens, as in 1024/128")
    num_input, num_output = int(found.group(1)), int(found.group(2))
    if num_input < 1 or num_output < 2:
        raise ConfigError(f"{where}: lengths: {text!r}; a prompt has 1 token or more, a measured answer 2 or more")
    return num_input, num_output


def _deployments(spec: DeploymentSpec, where: str) -> Iterator[Deployment]:
    settings = tuple(_setting(key, value) for key, value in spec.set.items())
    axes = [[(key, value) for value in values] for key, values in spec.vary.items()]
    for values in itertools.product(*axes):
        varied = tuple(_setting(key, value) for key, value in values)
        recipe = load_recipe(spec.recipe, add_settings("", [*settings, *varied]))
        base = ", ".join([spec.name or recipe.name, *(_short(setting) for setting in varied)])
        if not spec.workers:
            yield _deployment(spec, base, recipe, (*settings, *varied))
            continue
        for count in _fitting(spec, recipe, where):
            replicas = _replicas(count)
            with_workers = (*settings, *varied, *replicas)
            recipe = load_recipe(spec.recipe, add_settings("", with_workers))
            yield _deployment(spec, f"{base} {count}", recipe, with_workers, placed=True)


def _deployment(
    spec: DeploymentSpec, name: str, recipe: Recipe, settings: tuple[str, ...], placed: bool = False
) -> Deployment:
    if "decode" not in recipe.workers:
        raise ConfigError(f"{spec.recipe}: it has no decode workers, so it makes no tokens that could be measured")
    return Deployment(
        name=name, recipe=recipe.folder, settings=settings, kind=kind_of(recipe),
        workers={stage: entry.replicas for stage, entry in recipe.workers.items()}, placed=placed,
    )  # fmt: skip


def kind_of(recipe: Recipe) -> Kind:
    return "disaggregated" if "prefill" in recipe.workers else "aggregated"


def _fitting(spec: DeploymentSpec, recipe: Recipe, where: str) -> list[str]:
    """Return the counts of workers that are of the recipe's kind."""
    counts = [str(count) for count in spec.workers]
    if wrong := [text for text in counts if not _WORKERS.fullmatch(text)]:
        raise ConfigError(f"{where}: workers: {wrong[0]!r}; write 2 for two that do both, 1:2 for prefill:decode")
    is_apart = kind_of(recipe) == "disaggregated"
    if not (found := [text for text in counts if (":" in text) == is_apart]):
        form = "prefill:decode, as in 1:2" if is_apart else "a number, as in 2"
        raise ConfigError(
            f"{spec.recipe} is {kind_of(recipe)}: none of its workers is {form}; it would not be measured"
        )
    return found


def _replicas(count: str) -> tuple[str, ...]:
    *prefill, decode = count.split(":")
    return (*(f"workers.prefill.replicas={one}" for one in prefill), f"workers.decode.replicas={decode}")


def _cells(matrix: Matrix, deployments: Sequence[Deployment], lengths: Sequence[tuple[int, int]]) -> Iterator[Cell]:
    """All of one launch together. No two have the same prompts: the second would find them in a cache."""
    seeds = itertools.count(matrix.seed)
    pressures = [(count, 0.0) for count in matrix.concurrency] + [(0, rate) for rate in matrix.rates]
    turns = range(1, matrix.repeats + 1)
    for deployment, turn, (num_input, num_output), pressure in itertools.product(
        deployments, turns, lengths, pressures
    ):
        for load in matrix.loads:
            concurrency, rate = pressure
            yield Cell(
                deployment=deployment.name, load=load, input_tokens=num_input, output_tokens=num_output,
                concurrency=concurrency, rate=rate, seed=next(seeds), repeat=turn,
                requests=matrix.requests_per_stream * concurrency or max(1, round(matrix.rate_seconds * rate)),
                warmup=matrix.warmup_per_stream * (concurrency or 1),
            )  # fmt: skip


def _check_names(deployments: Sequence[Deployment]) -> None:
    slugs: dict[str, str] = {}
    for one in deployments:
        if one.slug in slugs:
            raise ConfigError(f"two deployments would be called {one.name!r}; give each a `name` of its own")
        slugs[one.slug] = one.name


def _setting(key: str, value: Any) -> str:
    return f"{key}={msgspec.json.encode(value).decode()}"


def _short(setting: str) -> str:
    """workers.decode.engine_config.max_batch_size=64 -> max_batch_size=64"""
    key, _, value = setting.partition("=")
    stage = f"{key.split('.')[1]} " if key.startswith("workers.") else ""
    return f"{stage}{key.rpartition('.')[2]}={value}"


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=-]+", "-", name.replace(":", "p")).strip("-.")
