"""Check recipes without serving them: no GPU, no model, no TensorRT-LLM needed.

    python tools/check_recipe.py recipes/*
    python tools/check_recipe.py recipes/qwen3 --json
    python tools/check_recipe.py recipes/deepseek-r1-wide-ep --warnings-are-errors

One line for each finding: file, line, error or warning, key, value, the reason, what to do instead. TensorRT-LLM's
engine YAMLs are held against its API for every release that bireme drives, or the one that `engine_version` names.
With --gpu it is the GPUs named that engines are to run on, in place of this machine's: what they lack (8-bit floats,
bfloat16) and what does not fit is said before anybody starts there. The host's memory stays this machine's.

    python tools/check_recipe.py recipes/tiny --gpu h100
    python tools/check_recipe.py recipes/tiny --gpu 24@8.6

With --json the last line is one JSON document.

Where a worker's model is on this machine, lines follow of what its engines take of memory: weights, KV pool, the
largest step. What can't fit is an error; what fits only while pools are not full, or after a load, is a warning. With
--gpu they follow for each recipe, and say of which workers nothing could be held against the GPUs.

Exit codes: 0 every recipe can be served (warnings may have been printed); 1 a recipe has an error; 2 there is no
recipe where one was named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import CHECKOUT
from bireme.launch.footprint.launch_footprint import LaunchFootprint
from bireme.launch.footprint.machine_memory import MachineMemory, read_machine
from bireme.launch.recipe_check import Finding, check_folder, footprint_of
from bireme.sizing.machines import GPUS

GOOD, BAD, WRONG = 0, 1, 2


class TargetGpu(NamedTuple):
    num_bytes: int
    capability: tuple[int, int]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folders = [folder for name in options.recipes for folder in recipe_folders(Path(name))]
    missing = [name for name in options.recipes if not recipe_folders(Path(name))]
    for name in missing:
        print(f"{name}: no recipe.yaml there; name a recipe's folder, such as recipes/tiny", file=sys.stderr)
    machine = with_gpus(read_machine(), options.gpu)
    found = {str(folder): check_folder(folder, machine) for folder in folders}
    report(found, {str(folder): footprint_of(folder, machine) for folder in folders}, bool(options.gpu))
    if options.json:
        print(json.dumps({name: [finding.to_json() for finding in findings] for name, findings in found.items()}))
    if missing or not folders:
        return WRONG
    return BAD if any(map(is_error(options.warnings_are_errors), sum(found.values(), []))) else GOOD


def parse(arguments: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [str(CHECKOUT / "recipes")]
    parser.add_argument("recipes", nargs="*", default=default, metavar="RECIPE", help="folders; default: all recipes")
    told = f"one of {', '.join(GPUS)}, or GiB@CAPABILITY such as 40@8.0; once for each GPU"
    parser.add_argument("--gpu", type=target_gpu, action="append", default=[], metavar="GPU", help=told)
    parser.add_argument("--json", action="store_true", help="end with one JSON document: recipe -> findings")
    parser.add_argument("--warnings-are-errors", action="store_true", help="exit with 1 for a warning, too")
    return parser.parse_args(arguments)


def target_gpu(text: str) -> TargetGpu:
    """Read one --gpu. Raises ArgumentTypeError."""
    if (known := GPUS.get(text)) is not None:
        return TargetGpu(known.memory_bytes, known.capability)
    if (found := re.fullmatch(r"(\d{1,4})@(\d{1,2})\.(\d)", text)) is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text}: one of {', '.join(GPUS)}, or GiB@CAPABILITY such as 40@8.0")
    return TargetGpu(int(found[1]) << 30, (int(found[2]), int(found[3])))


def with_gpus(machine: MachineMemory, gpus: list[TargetGpu]) -> MachineMemory:
    """Return a machine with these GPUs, or with its own where none is named."""
    if not gpus:
        return machine
    sizes, capabilities = zip(*gpus, strict=True)
    return replace(machine, gpus=sizes, capabilities=capabilities)


def recipe_folders(path: Path) -> list[Path]:
    """Return the recipe at `path`, given by its folder or its recipe.yaml, or the recipes right below it."""
    if path.name == "recipe.yaml":
        path = path.parent
    if (path / "recipe.yaml").is_file():
        return [path]
    return sorted(entry.parent for entry in path.glob("*/recipe.yaml"))


def is_error(warnings_count: bool) -> Callable[[Finding], bool]:
    return lambda finding: warnings_count or finding.severity == "error"


def report(
    found: dict[str, list[Finding]], sizes: dict[str, LaunchFootprint | None], tells_uncounted: bool = False
) -> None:
    for name, findings in found.items():
        for finding in findings:
            print(finding)
        errors = sum(finding.severity == "error" for finding in findings)
        warnings = len(findings) - errors
        words = [f"{errors} error(s)"] * bool(errors) + [f"{warnings} warning(s)"] * bool(warnings)
        print(f"{name}: {', '.join(words) or 'good'}")
        footprint = sizes[name]
        if footprint is not None and (tells_uncounted or any(one.engine is not None for one in footprint.workers)):
            for line in footprint.lines():
                print(f"{name}: {line}")


if __name__ == "__main__":
    sys.exit(main())
