"""Recipe folders, read: `recipe.yaml`, its engine YAMLs and the override, merged and checked.

Precedence: defaults < recipe < BIREME_OVERRIDE (JSON, deep merge; each replaced scalar is logged). Unknown keys
are errors that suggest the nearest one.

    model: models/tiny-llama            # folder (relative to the checkout) or hub id
    workers:
      prefill: {engine: torch, engine_config: prefill.yaml}
      decode:  {engine: torch, engine_config: decode.yaml, replicas: 2}
"""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bireme import llm_args, yaml_text
from bireme.config import (
    CHECKOUT,
    DEFAULT_RECIPE,
    UNREAD_EVENTS,
    UNREAD_EVENTS_REMEDY,
    WORKER_STAGES,
    BusyRule,
    EngineConfig,
    GrpcTlsConfig,
    Recipe,
    WorkerEntry,
    find_model,
)
from bireme.conversion import convert, keys_of
from bireme.engine_kinds import ENGINE_KINDS
from bireme.errors import ConfigError
from bireme.metrics import MAX_BUCKETS, TABLE
from bireme.settings import DRAFT_KINDS, DiscoveryConfig

logger = logging.getLogger("bireme.recipe_files")
_SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?")
_NO_INSTANCES = (
    "this key was removed, a worker has one stub; leave it out. Many streams of decode's own clients: use generate,"
    " which takes input_ids and gives output_ids, with pipeline.instances.generate, or raise workers.decode.replicas"
)


def load_recipe(path: str | Path | None = None, override: str | None = None) -> Recipe:
    """Read a recipe folder. Defaults: BIREME_RECIPE, else recipes/tiny; BIREME_OVERRIDE. Raises ConfigError."""
    folder = _recipe_folder(path or os.environ.get("BIREME_RECIPE") or DEFAULT_RECIPE)
    recipe = make_recipe(recipe_tree(folder, override), folder)
    check_rules(recipe)
    return recipe


def recipe_tree(folder: Path, override: str | None = None) -> dict[str, Any]:
    """Return a recipe folder's YAML, engine YAMLs and the override merged in, unchecked. Raises ConfigError."""
    tree = _read_yaml(folder / "recipe.yaml")
    _read_engine_configs(tree, folder)
    _merge_engine_args(tree)
    text = os.environ.get("BIREME_OVERRIDE", "") if override is None else override
    if text:
        deep_merge(tree, _parse_override(text))
        _read_engine_configs(tree, folder)
        _merge_engine_args(tree)
    return tree


def make_recipe(tree: dict[str, Any], folder: Path) -> Recipe:
    """Turn a recipe's tree into a Recipe; changes `tree`. Raises ConfigError for the first key or value wrong."""
    for reserved in ("name", "folder"):
        if reserved in tree:
            raise ConfigError(f"{folder}/recipe.yaml: {reserved} is the folder's name; remove the key")
    for name, worker in _workers(tree).items():
        if isinstance(worker, dict) and "instances" in worker:
            raise ConfigError(f"{folder}/recipe.yaml: workers.{name}.instances: {_NO_INSTANCES}")
        _split_llm_args(worker, folder)
        _check_drafter(worker, f"{folder}/recipe.yaml: workers.{name}", folder)
        convert(worker, WorkerEntry, f"{folder}/recipe.yaml: workers.{name}")  # an error names this worker
    return convert(tree | {"name": folder.name, "folder": str(folder)}, Recipe, f"{folder}/recipe.yaml")


def deep_merge(base: dict[str, Any], override: Mapping[str, Any], path: str = "") -> None:
    """Merge `override` into `base` in place: blocks key by key, everything else replaced (and logged)."""
    for key, value in override.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            deep_merge(base[key], value, where)
        else:
            logger.info("override key=%s old=%s new=%s", where, base.get(key), value)
            base[key] = value


def _recipe_folder(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_absolute() and not (folder / "recipe.yaml").exists():
        folder = CHECKOUT / folder
    if (folder / "recipe.yaml").exists():
        return folder.resolve()
    known = sorted(entry.parent.name for entry in (CHECKOUT / "recipes").glob("*/recipe.yaml"))
    near = difflib.get_close_matches(folder.name, known, n=1)
    hint = f"did you mean recipes/{near[0]}?" if near else f"known recipes: {', '.join(known)}"
    raise ConfigError(f"no recipe at {path} (a folder with recipe.yaml); {hint}")


def _workers(tree: dict[str, Any]) -> dict[str, Any]:
    workers = tree.get("workers")
    return workers if isinstance(workers, dict) else {}


def _read_engine_configs(tree: dict[str, Any], folder: Path) -> None:
    for worker in _workers(tree).values():
        if isinstance(worker, dict) and isinstance(worker.get("engine_config"), str):
            worker["engine_config"] = _read_yaml(folder / worker["engine_config"])


def _merge_engine_args(tree: dict[str, Any]) -> None:
    """Merge each worker's engine_args over its engine_config; `convert` refuses what is no mapping."""
    for name, worker in _workers(tree).items():
        if not isinstance(worker, dict) or not isinstance(worker.get("engine_args"), dict):
            continue
        config = worker.setdefault("engine_config", {})
        if isinstance(config, dict):
            deep_merge(config, worker.pop("engine_args"), f"workers.{name}.engine_config")


def _split_llm_args(worker: Any, folder: Path) -> None:
    if not isinstance(worker, dict):
        return
    kind = next((kind for name, kind in ENGINE_KINDS.items() if name == worker.get("engine")), None)
    if kind is not None and kind.has_llm_args:
        config = worker.get("engine_config", {})
        if isinstance(config, dict):
            llm_args.inline(config, folder, _read_yaml, lambda name: find_model(name, str(folder)))
            worker["engine_config"] = llm_args.split(config, keys_of(EngineConfig))


def _check_drafter(worker: Any, where: str, folder: Path) -> None:
    """Refuse a kind of draft by its own name: of the keys beside it TensorRT-LLM has some that are unknown here.

    A draft model's folder is found as `model` is.
    """
    config = worker.get("engine_config") if isinstance(worker, dict) else None
    block = config.get("speculative_config") if isinstance(config, dict) else None
    name = worker.get("engine", WorkerEntry().engine) if isinstance(worker, dict) else ""
    rule = DRAFT_KINDS.rules.get(name) if isinstance(name, str) else None
    kind = block.get("decoding_type", "") if isinstance(block, dict) else ""
    if rule is not None and rule.kind == "refused" and kind not in rule.accepted:
        key = f"{where}.engine_config.speculative_config.decoding_type"
        raise ConfigError(f"{key}: {kind!r} on engine {name}: {rule.reason}")
    if rule is not None:
        _find_draft_model(block, f"{where}.engine_config.speculative_config.speculative_model", folder)


def _find_draft_model(block: Any, key: str, folder: Path) -> None:
    if not isinstance(block, dict):
        return
    if "speculative_model_dir" in block:  # TensorRT-LLM's other name for it
        block.setdefault("speculative_model", block.pop("speculative_model_dir"))
    if isinstance(name := block.get("speculative_model"), str):
        try:
            block["speculative_model"] = find_model(name, str(folder), "the key")
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml_text.read(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: what looks like a date and is none
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a mapping is expected at the top, not {type(tree).__name__}")
    try:
        return {key: _unshared(value) for key, value in tree.items()}
    except RecursionError:
        raise ConfigError(f"{path}: an alias (*name) stands in the block that it names; write the block out") from None


def _unshared(tree: Any) -> Any:
    """Copy what YAML's anchors share: a change of one worker must not reach the others."""
    if isinstance(tree, dict):
        return {key: _unshared(value) for key, value in tree.items()}
    return [_unshared(item) for item in tree] if isinstance(tree, list) else tree


def _parse_override(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"BIREME_OVERRIDE: not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError("BIREME_OVERRIDE: a JSON object is expected")
    return tree


def check_rules(recipe: Recipe) -> None:
    """Raise ConfigError for the first rule across fields that the recipe breaks, with its reason."""
    for stage, entry in recipe.workers.items():
        _check_worker(stage, entry, is_shared=recipe.discovery.is_shared)
    _check_discovery(recipe.discovery)
    _check_certificates(recipe.grpc_tls)
    _check_stages(recipe)
    _check_events(recipe)
    _check_busy(recipe.router.busy)
    _check_buckets(recipe)
    if "multimodal_encoder" in recipe.workers:
        _check_encoder(recipe.workers)
    if recipe.embedding_backend == "NIXL":
        _check_no_pool(recipe.workers)
    if "embedding" in recipe.workers:
        _check_embedding(recipe.workers)
    if "prefill" in recipe.workers:
        _check_disaggregated(recipe.workers["prefill"], recipe.workers["decode"])


def _check_worker(stage: str, entry: WorkerEntry, is_shared: bool) -> None:
    if stage not in WORKER_STAGES:
        near = difflib.get_close_matches(stage, WORKER_STAGES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"workers.{stage}: not a stage ({', '.join(WORKER_STAGES)}){hint}")
    least = 0 if is_shared and stage != "video_diffusion" else 1
    if not least <= entry.replicas <= 64:
        hint = "; 0 leaves the stage to other servers and needs discovery" if entry.replicas == 0 else ""
        raise ConfigError(f"workers.{stage}.replicas: {entry.replicas}; {least} to 64{hint}")


def _check_certificates(tls: GrpcTlsConfig) -> None:
    files = {name: getattr(tls, name) for name in ("certificate", "key", "authority")}
    if any(files.values()) and not all(files.values()):
        missing = next(name for name, path in files.items() if not path)
        raise ConfigError(f"grpc_tls.{missing}: missing; certificate, key and authority belong together")


def _check_stages(recipe: Recipe) -> None:
    if "decode" not in recipe.workers and "prefill" in recipe.workers:
        raise ConfigError("workers: prefill without decode; add decode, or use decode alone for aggregated serving")
    if recipe.pipeline.enforce_disaggregation and "prefill" not in recipe.workers:
        raise ConfigError("pipeline.enforce_disaggregation is true but the recipe has no prefill worker")


def _check_busy(rules: Sequence[BusyRule]) -> None:
    for at, rule in enumerate(rules):
        if rule.max_kv_usage is None and rule.max_waiting_tokens is None:
            raise ConfigError(f"router.busy[{at}]: no bound; set max_kv_usage, max_waiting_tokens or both")


def _check_buckets(recipe: Recipe) -> None:
    histograms = [name for name, spec in TABLE.items() if spec.kind == "histogram" and name.startswith("bireme_")]
    for name, bounds in recipe.metrics.buckets.items():
        where = f"{recipe.folder}/recipe.yaml: metrics.buckets.{name}"
        if name not in histograms:
            near = difflib.get_close_matches(name, histograms, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; docs/metrics.md lists them"
            raise ConfigError(f"{where}: no histogram of bireme{hint}")
        _check_bounds(where, bounds)


def _check_bounds(where: str, bounds: Sequence[float]) -> None:
    if not 1 <= len(bounds) <= MAX_BUCKETS:
        raise ConfigError(f"{where}: {len(bounds)} bounds; give 1 to {MAX_BUCKETS}")
    for before, bound in itertools.pairwise((-math.inf, *bounds)):
        if not 0 <= bound < math.inf:
            raise ConfigError(f"{where}: {bound}; a bound is a finite number from 0 on, +Inf comes by itself")
        if bound <= before:
            raise ConfigError(f"{where}: {bound} after {before}; bounds must ascend")


def _check_events(recipe: Recipe) -> None:
    events = recipe.kv_events
    if events.plane == "zmq":
        if events.nats_url or events.nats_credentials:
            raise ConfigError(
                "kv_events.nats_url and nats_credentials are for planes nats and jetstream; set kv_events.plane"
            )
    elif not events.nats_url:
        raise ConfigError(f"kv_events.plane is {events.plane} but kv_events.nats_url is not set (nats://host:4222)")
    elif events.host:
        raise ConfigError(f"kv_events.host: {events.host!r} is for plane zmq, plane is {events.plane}; remove it")
    for stage, entry in recipe.workers.items():
        size = entry.engine_config.kv_cache_config.event_buffer_max_size
        if size and not recipe.publishes_events and not entry.kind.has_llm_args:  # those have checks of their own
            raise ConfigError(
                f"workers.{stage}.engine_config.kv_cache_config.event_buffer_max_size: {size}; {UNREAD_EVENTS};"
                f" {UNREAD_EVENTS_REMEDY}"
            )


def _check_discovery(discovery: DiscoveryConfig) -> None:
    needed = {"directory": "folder", "etcd": "endpoints", "kubernetes": "service"}.get(discovery.backend)
    if needed and not getattr(discovery, needed):
        raise ConfigError(f"discovery.{needed}: missing; discovery.backend {discovery.backend} needs it")
    for endpoint in discovery.endpoints:
        if not re.fullmatch(r"https?://[^/\s]+:\d+", endpoint):
            raise ConfigError(f"discovery.endpoints: {endpoint}; write http://host:2379 or https://host:2379")
    if discovery.service and not _SERVICE.fullmatch(discovery.service):
        raise ConfigError(f"discovery.service: {discovery.service}; write a Service's NAME, or NAME.NAMESPACE")
    if bool(discovery.cert) != bool(discovery.cert_key):
        raise ConfigError("discovery: cert and cert_key belong together; give both or none")


def _check_encoder(workers: Mapping[str, WorkerEntry]) -> None:
    encoder = workers["multimodal_encoder"]
    for name in ("prefill", "decode"):
        entry = workers.get(name)
        if entry is None or not entry.kind.needs_model:
            continue
        if entry.engine_config.dtype != encoder.engine_config.dtype:
            raise ConfigError(
                f"dtype: multimodal_encoder has {encoder.engine_config.dtype}, {name} {entry.engine_config.dtype};"
                " embeddings are not converted on their way, use one dtype"
            )


def _check_no_pool(workers: Mapping[str, WorkerEntry]) -> None:
    for name, entry in workers.items():
        if size := entry.engine_config.multimodal_config.embedding_pool_bytes:
            raise ConfigError(
                f"workers.{name}.engine_config.multimodal_config.embedding_pool_bytes: {size}; embeddings go by NIXL"
                " here, as KV does, and not through memory that one host's processes map; leave it out"
            )


def _check_embedding(workers: Mapping[str, WorkerEntry]) -> None:
    if others := [stage for stage in workers if stage != "embedding"]:
        raise ConfigError(
            f"workers.embedding: beside {others[0]}; a recipe serves one model, give it a recipe and server of its own"
            " (one frontend serves both)"
        )
    if not workers["embedding"].kind.makes_embeddings:
        raise ConfigError(
            f"workers.embedding.engine: {workers['embedding'].engine} makes no embeddings; set engine: torch"
        )


def _check_disaggregated(prefill: WorkerEntry, decode: WorkerEntry) -> None:
    first, second = prefill.engine_config, decode.engine_config
    if prefill.engine != decode.engine:
        raise ConfigError(
            f"workers: prefill runs on {prefill.engine}, decode on {decode.engine}; KV layouts differ between engines"
        )
    if first.kv_cache_config.dtype != second.kv_cache_config.dtype:
        raise ConfigError(
            f"workers.decode.engine_config.kv_cache_config.dtype: {second.kv_cache_config.dtype}; prefill has"
            f" {first.kv_cache_config.dtype}, and transferred blocks are not converted: use one dtype"
        )
    _check_transceiver("prefill", first)
    _check_transceiver("decode", second)


def _check_transceiver(name: str, config: EngineConfig) -> None:
    transceiver = config.cache_transceiver_config
    if transceiver.backend is None:
        raise ConfigError(
            f"workers.{name}.engine_config.cache_transceiver_config.backend is not set; disaggregation needs it"
            " (DEFAULT)"
        )
    longest = config.max_input_len or config.max_seq_len
    if transceiver.max_tokens_in_buffer and longest and transceiver.max_tokens_in_buffer < longest:
        raise ConfigError(
            f"workers.{name}.engine_config.cache_transceiver_config.max_tokens_in_buffer:"
            f" {transceiver.max_tokens_in_buffer}; less than the longest input {longest}: its transfer could never"
            f" start; raise it to {longest} or lower max_seq_len"
        )
