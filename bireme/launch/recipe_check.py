"""Everything that is wrong with a recipe, found without an engine, a GPU or the model.

One run reports all: what a loader stops at is noted and taken out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from bireme import yaml_text
from bireme.config import Recipe
from bireme.engines.config import check_values, refusals
from bireme.engines.trtllm import pair_rules
from bireme.engines.trtllm.problems import NOTHING, Problem, show
from bireme.errors import ConfigError
from bireme.launch.footprint.launch_footprint import LaunchFootprint
from bireme.launch.footprint.machine_memory import MachineMemory
from bireme.launch.repository import used_models
from bireme.launch.yaml_source import Keys, Place, YamlSource, read_source
from bireme.recipe_files import check_rules, make_recipe, recipe_tree
from bireme.sampling import check_defaults
from bireme.text.parsers import reasoning_format, tool_format

_MOST_FINDINGS = 200  # of one recipe: a file that is all wrong needs no longer list


@dataclass(frozen=True, slots=True)
class Finding:
    """`key` is dotted from the top of recipe.yaml; "": the file as a whole."""

    file: str
    line: int
    key: str
    value: str  # as YAML writes it; "" where nothing stands
    reason: str
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        what = f"{self.key}: {self.value}" if self.value else self.key
        parts = [part for part in (what, self.reason, self.remedy) if part]
        return f"{self.file}:{self.line}: {self.severity}: {'; '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_folder(folder: Path, machine: MachineMemory | None = None) -> list[Finding]:
    """Return findings in the order of the recipe's files. `machine`: whose memory is to hold it."""
    try:
        source = read_sources(folder)
        tree = recipe_tree(folder, "")
    except yaml.YAMLError as error:
        return [_not_yaml(error, folder)]
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        return [Finding(str(folder / "recipe.yaml"), 1, "", "", str(error), "")]
    return sorted(_check(folder, tree, source, machine), key=lambda finding: (finding.file, finding.line))


def footprint_of(folder: Path, machine: MachineMemory) -> LaunchFootprint | None:
    """Return what the recipe's launch takes of this machine; None: the recipe has errors."""
    try:
        recipe = make_recipe(recipe_tree(folder, ""), folder)
        return LaunchFootprint(recipe, machine, _num_stubs(recipe))
    except (ConfigError, OSError, UnicodeDecodeError, yaml.YAMLError):
        return None


def _num_stubs(recipe: Recipe) -> int:
    return sum(len(recipe.instances(model)) for models in used_models(recipe) for model in models)


def _check(folder: Path, tree: dict[str, Any], source: YamlSource, machine: MachineMemory | None) -> Iterator[Finding]:
    for repeated in source.repeated:
        reason = f"written twice, first in line {repeated.first.line}; the last one counts"
        yield _finding(source, repeated.keys, "", reason, "remove one", place=repeated.second)
    recipe, found = _make(folder, tree, source)
    yield from found
    if recipe is None:
        return
    findings = [_from_problem(problem, source) for problem in pair_rules.check_recipe(recipe)]
    findings += _check_engines(recipe, source)
    findings += _check_models(recipe, source)
    if machine is not None and not any(finding.severity == "error" for finding in [*found, *findings]):
        findings += _check_memory(recipe, source, machine)
    said = {finding.key for finding in findings if finding.severity == "error"}
    yield from findings
    yield from (finding for finding in _check_rules(recipe, tree, source, folder) if finding.key not in said)


def _check_memory(recipe: Recipe, source: YamlSource, machine: MachineMemory) -> Iterator[Finding]:
    for problem in LaunchFootprint(recipe, machine, _num_stubs(recipe)).problems():
        severity: Literal["error", "warning"] = "error" if problem.is_error else "warning"
        keys = tuple(problem.key.split("."))
        yield _finding(source, keys, problem.value, problem.reason, problem.remedy, severity)


def _check_rules(recipe: Recipe, tree: dict[str, Any], source: YamlSource, folder: Path) -> Iterator[Finding]:
    try:
        check_rules(recipe)
    except ConfigError as error:
        keys, text = _split_message(str(error), folder)
        yield _from_text(text, keys, tree, source)


def _make(folder: Path, tree: dict[str, Any], source: YamlSource) -> tuple[Recipe | None, list[Finding]]:
    """Note each error and take its key out, until nothing helps."""
    found: list[Finding] = []
    while len(found) < _MOST_FINDINGS:
        try:
            return make_recipe(copy.deepcopy(tree), folder), found
        except ConfigError as error:
            keys, text = _split_message(str(error), folder)
            found.append(_from_text(text, keys, tree, source))
            if not keys or not _take_out(tree, keys):
                break
    return None, found


def _split_message(text: str, folder: Path) -> tuple[Keys, str]:
    """`.../recipe.yaml: workers.decode: engine_config.dtype: 3; ...` -> the key's path, the message from there."""
    text = text.removeprefix(f"{folder}/recipe.yaml: ")
    worker = re.match(r"workers\.([\w-]+): (.*)", text, re.DOTALL)
    prefix: Keys = ("workers", worker.group(1)) if worker else ()
    text = worker.group(2) if worker else text
    key = re.match(r"(?:unknown key )?([A-Za-z_][\w.-]*)(?=[:;]| is | has )", text)
    return (*prefix, *key.group(1).split(".")) if key else prefix, text


def _take_out(tree: Any, keys: Keys) -> bool:
    *blocks, name = keys
    for block in blocks:
        tree = tree.get(block) if isinstance(tree, dict) else None
    return isinstance(tree, dict) and tree.pop(name, NOTHING) is not NOTHING


def _from_text(text: str, keys: Keys, tree: Any, source: YamlSource) -> Finding:
    value = tree
    for name in keys:
        value = value.get(name, NOTHING) if isinstance(value, dict) else NOTHING
    shown = "" if value is NOTHING or isinstance(value, dict) else show(value)
    message = re.sub(r"^(unknown key )?[\w.-]+(: |; |(?= ))", lambda match: match.group(1) or "", text, count=1)
    reason, _, remedy = message.removeprefix(f"{shown}; ").partition("; ")
    return _finding(source, keys, shown, reason.strip().rstrip(":"), remedy)


def _check_engines(recipe: Recipe, source: YamlSource) -> Iterator[Finding]:
    """TensorRT-LLM's YAMLs have a check of their own."""
    for stage, entry in recipe.workers.items():
        if entry.kind.has_llm_args:
            continue
        below: Keys = ("workers", stage, "engine_config")
        for key, value, text in refusals(entry):
            reason, _, remedy = text.partition("; ")
            yield _finding(source, (*below, *key.split(".")), show(value), f"engine {entry.engine}: {reason}", remedy)
        try:
            check_values(entry.engine_config)
        except ConfigError as error:
            key, _, text = str(error).partition(": ")
            value, _, text = text.partition("; ")
            reason, _, remedy = text.partition(", so ")
            yield _finding(source, (*below, *key.split(".")), value, reason, remedy)


def _check_models(recipe: Recipe, source: YamlSource) -> Iterator[Finding]:
    """Names that are looked up when requests come, and the defaults for these."""
    checks: dict[Keys, Callable[[], object]] = {
        ("chat", "reasoning_parser"): lambda: reasoning_format(recipe.chat.reasoning_parser),
        ("chat", "tool_parser"): lambda: tool_format(recipe.chat.tool_parser),
        ("sampling",): lambda: check_defaults(recipe),
    }
    for keys, check in checks.items():
        try:
            check()
        except ConfigError as error:
            _, _, text = str(error).partition(": ")
            yield _finding(source, keys, "", text or str(error), "")


def _from_problem(problem: Problem, source: YamlSource) -> Finding:
    """`devices` and the like stand in recipe.yaml."""
    in_recipe = problem.path[:1] in (("devices",), ("engine",), ("engine_version",))
    block: Keys = () if in_recipe else ("engine_config",)
    shown = "" if problem.value is NOTHING else show(problem.value)
    keys = ("workers", problem.worker, *block, *problem.path)
    return _finding(source, keys, shown, problem.reason, problem.remedy, problem.severity)


def _finding(
    source: YamlSource,
    keys: Keys,
    value: str,
    reason: str,
    remedy: str,
    severity: Literal["error", "warning"] = "error",
    place: Place | None = None,
) -> Finding:
    in_args = tuple("engine_args" if name == "engine_config" else name for name in keys)
    keys = in_args if in_args in source.places else keys
    found = place or source.find(keys)
    return Finding(str(found.file), found.line, ".".join(keys), value, reason, remedy, severity)


def read_sources(folder: Path) -> YamlSource:
    """Of a recipe's YAML and the files that it names, as far as they exist. Raises yaml.YAMLError and OSError."""
    source = read_source(folder / "recipe.yaml")
    workers = yaml_text.read((folder / "recipe.yaml").read_text(encoding="utf-8"))
    workers = workers.get("workers") if isinstance(workers, dict) else None
    for stage, worker in (workers if isinstance(workers, dict) else {}).items():
        if isinstance(worker, dict):
            _include_files(source, ("workers", str(stage)), {"engine_config": worker.get("engine_config")}, folder)
    return source


def _include_files(source: YamlSource, keys: Keys, named: dict[str, Any], folder: Path) -> None:
    for name, value in named.items():
        if not isinstance(value, str) or not (folder / value).is_file():
            continue
        below = (*keys, *name.split("."))
        source.include(below, read_source(folder / value))
        if name == "engine_config":
            tree = yaml_text.read((folder / value).read_text(encoding="utf-8"))
            block = tree.get("moe_config") if isinstance(tree, dict) else None
            balancer = block.get("load_balancer") if isinstance(block, dict) else None
            _include_files(source, below, {"moe_config.load_balancer": balancer}, folder)


def _not_yaml(error: yaml.YAMLError, folder: Path) -> Finding:
    mark = getattr(error, "problem_mark", None)
    file = folder / "recipe.yaml" if mark is None or mark.name.startswith("<") else Path(mark.name)
    reason = f"not valid YAML: {getattr(error, 'problem', None) or error}"
    return Finding(str(file), mark.line + 1 if mark else 1, "", "", reason, "")
