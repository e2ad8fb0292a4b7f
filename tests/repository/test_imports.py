"""Who may import whom, by AST: an arrow that points the wrong way fails here, with file and line."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from typing import get_args

import pytest

from bireme.engine_kinds import ENGINE_KINDS, EngineName
from tests.repository.house import CHECKOUT, MODULES, PACKAGE, imports_of, name_of, nodes_of

# Lower may not import higher. Modules of one row may import each other.
ROWS = (
    ("errors", "settings", "best_effort", "canary_mark", "coalescing", "engine_kinds", "own_process", "child_process")
    + ("private_files", "yaml_text"),
    ("specs", "messages", "sampling", "guides", "request", "disagg", "config", "conversion", "metrics", "types")
    + ("parameters", "serving_options", "stop_signals", "gathering", "inbox", "own_work", "request_trace")
    + ("metric_aliases", "gguf"),
    ("recipe_files", "llm_args"),
    ("kv", "text", "logits", "multimodal", "video", "discovery", "observability", "sizing"),
    ("planner",),
    ("engines",),
    ("workers",),
    ("stages", "pipelines"),
    ("triton",),
)
ENGINES = PACKAGE / "engines"
# The same inside engines/: strictly downwards, so that no two folders import each other.
ENGINE_ROWS = (
    ("base", "config"),
    ("stub",),
    ("memory",),
    ("child",),
    ("logits", "video"),
    ("mocker", "torch"),
    ("trtllm",),
    ("registry",),
    ("worker",),
)
# Folders of many modules: rows of rooms, strictly downwards and with what is imported for types alone; how many rooms
# and arrows between them there may be.
ROOMS = {
    "engines/torch": (
        (
            ("geometry", "step", "native", "storage"),
            ("kernels", "weights"),
            ("pools", "embedding"),
            ("images", "forward"),
            ("scheduling",),
            ("loading",),
            ("engine",),
        ),
        16,
        36,
    ),
    "kv": (
        (("kernels", "blocks"), ("wire",), ("publishing", "following", "routing", "transfer"), ("compile",)),
        8,
        12,
    ),
}
ENGINE_NAMES = {repr(name) for name in get_args(EngineName)}
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}
# Outside the rows: programs that start others or act on them, and the frontend, which can run on another machine.
OUTSIDE = {"launch", "openai", "scaling"}
# What the stubs load: must stay light.
STUB_PARTS = ("stages", "pipelines", "text", "workers", "triton", "discovery")
TORCH_HOMES = ("engines/torch", "engines/trtllm", "engines/video", "logits")
HEAVY = ("torch", "transformers", "tensorrt_llm", "diffusers", "nixl")
FORBIDDEN_CALLS = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")


def part_of(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def breaches(paths, is_breach):
    return [
        f"{name_of(path)}:{found.line} imports {found.module}"
        for path in paths
        for found in imports_of(path)
        if is_breach(path, found)
    ]


def top(found):
    return found.module.split(".")[0]


def test_imports_point_downwards():
    def is_upwards(path, found):
        if found.is_for_types or top(found) != "bireme" or part_of(path) not in RANK:
            return False
        target = found.module.split(".")[1]
        return target in OUTSIDE or RANK.get(target, 0) > RANK[part_of(path)]

    assert breaches(MODULES, is_upwards) == []


def test_every_part_of_the_package_has_its_place_in_the_order():
    assert {part_of(path) for path in MODULES} - {"__init__"} <= RANK.keys() | OUTSIDE


def test_imports_among_engines_point_downwards():
    rank = {name: rank for rank, row in enumerate(ENGINE_ROWS) for name in row}

    def is_upwards(path, found):
        part, target = path.relative_to(ENGINES).parts[0].removesuffix(".py"), found.module.split(".")[2:3]
        if found.is_for_types or not found.module.startswith("bireme.engines.") or part == target[0]:
            return False
        return rank[target[0]] >= rank[part]

    assert (
        breaches((path for path in ENGINES.rglob("*.py") if path.parent != ENGINES or path.stem in rank), is_upwards)
        == []
    )


def test_engines_has_few_entries_and_each_its_place_in_the_order():
    entries = {path.name.removesuffix(".py") for path in ENGINES.iterdir()} - {"__init__", "__pycache__"}
    assert entries == {name for row in ENGINE_ROWS for name in row}
    assert len(entries) <= 12


def room_of(folder, module):
    """Return the entry of a folder that a module lies in; "": it is elsewhere, or the folder itself."""
    inside = module.removeprefix(f"bireme.{folder.replace('/', '.')}.")
    return "" if inside == module else inside.split(".")[0]


@pytest.mark.parametrize("folder", ROOMS)
def test_a_folder_of_many_modules_has_few_rooms_and_few_arrows_between_them(folder):
    rows, most_rooms, most_arrows = ROOMS[folder]
    rank = {room: rank for rank, row in enumerate(rows) for room in row}
    entries = {path.name.removesuffix(".py") for path in (PACKAGE / folder).iterdir()} - {"__init__", "__pycache__"}
    assert entries == rank.keys()
    assert len(rank) <= most_rooms
    arrows = {
        (room, target): f"{name_of(path)}:{found.line} imports {found.module}"
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if (room := path.relative_to(PACKAGE / folder).parts[0].removesuffix(".py")) != "__init__"
        for found in imports_of(path)
        if (target := room_of(folder, found.module)) not in ("", room)
    }
    assert [told for (room, target), told in arrows.items() if rank[target] >= rank[room]] == []
    assert len(arrows) <= most_arrows


def test_no_code_but_its_own_asks_for_an_engine_by_its_name():
    """What differs between engines stands in engine_kinds.py."""
    named = [
        f"{name_of(path)}:{node.lineno}"
        for path in [*MODULES, *sorted((CHECKOUT / "tools").rglob("*.py"))]
        if not any(PACKAGE / "engines" / name in path.parents for name in get_args(EngineName))
        for node in nodes_of(path)
        if isinstance(node, ast.Compare) and "engine" in ast.unparse(node)
        if any(ast.unparse(part) in ENGINE_NAMES for part in ast.walk(node))
    ]
    assert named == []


def test_each_kind_of_engine_has_its_package():
    assert tuple(ENGINE_KINDS) == get_args(EngineName)
    for name in ENGINE_KINDS:
        package = importlib.import_module(f"bireme.engines.{name}")
        assert callable(package.create) and callable(package.create_video)


def test_triton_s_module_is_imported_in_one_folder_only():
    def is_outside(path, found):
        return top(found) == "triton_python_backend_utils" and part_of(path) != "triton"

    assert breaches(MODULES, is_outside) == []


def test_torch_stays_in_its_homes():
    def is_misplaced(path, found):
        if top(found) not in ("torch", "transformers") or found.is_for_types:
            return False
        return not any(PACKAGE / home in path.parents for home in TORCH_HOMES)

    assert breaches(MODULES, is_misplaced) == []


def test_tensorrt_llm_is_imported_in_its_engine_only():
    def is_outside(path, found):
        return top(found) == "tensorrt_llm" and (PACKAGE / "engines" / "trtllm") not in path.parents

    assert breaches(MODULES, is_outside) == []


def test_nothing_that_an_engine_s_environment_runs_needs_a_client_of_triton():
    """It bounds protobuf and grpcio, and NVIDIA's images have others."""
    paths = [*MODULES, CHECKOUT / "tools" / "demo.py"]
    assert breaches(paths, lambda path, found: top(found) == "tritonclient") == []


def test_stub_parts_import_nothing_heavy():
    paths = [path for path in MODULES if part_of(path) in STUB_PARTS]
    assert breaches(paths, lambda path, found: top(found) in HEAVY and not found.is_for_types) == []


def test_code_that_runs_what_it_reads_is_not_imported():
    assert breaches(MODULES, lambda path, found: top(found) in FORBIDDEN_CALLS) == []


def loaded_after(names, *packages):
    """Return which of these packages a process has when it has imported the names, by the name that brought them."""
    code = (
        f"import importlib, json, sys\nfound = {{}}\nfor name in {[*names]!r}:\n    importlib.import_module(name)\n"
        f"    for package in {packages!r}:\n        if package in sys.modules: found.setdefault(package, name)\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_torch_comes_with_an_implementation_not_with_its_package():
    packages = ("engines", "kv", "kv.transfer", "logits", "multimodal", "video")
    assert loaded_after([f"bireme.{package}" for package in packages], "torch") == {}


def test_an_engine_s_process_begins_without_asyncio():
    """A sixth of the CPU until it serves, which only some of its parts need."""
    names = ("bireme.engines.registry", "bireme.engines.mocker.engine", "bireme.engines.child.process")
    assert loaded_after(names, "asyncio", "torch") == {}


@pytest.mark.parametrize("part", ["stages", "pipelines"])
def test_a_stub_s_modules_load_without_the_heavy_ones(part):
    """The AST sees our own imports only; this sees what comes along with them."""
    names = [f"bireme.{part}.{path.stem}" for path in sorted((PACKAGE / part).glob("*.py")) if path.stem != "__init__"]
    assert loaded_after(names, *HEAVY, "grpc", "pandas", "scipy") == {}


def test_what_says_the_size_of_an_engine_before_it_starts_loads_no_torch():
    names = [f"bireme.engines.torch.{name}" for name in ("geometry", "native", "pools.sizes", "weights.dtypes")]
    names += [f"bireme.engines.torch.weights.{name}" for name in ("architectures", "limits")]
    assert loaded_after(names, "torch") == {}
