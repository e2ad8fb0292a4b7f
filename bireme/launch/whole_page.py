"""A launch's levels as one server's, under the names that its recipe asks for: what a gateway reads of a pod.

Triton's page has a series for each worker, of which a gateway takes one. Here queues and batches of all are added up.
The KV pool is that of the workers that compute prompts, and as full as the pools of the fullest stage.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from bireme.config import ROUTED_STAGES, Recipe, stage_of
from bireme.errors import BiremeError, UnavailableError
from bireme.launch.tritonserver import Server
from bireme.metric_aliases import Aliases, aliases_of_launch
from bireme.metrics import MetricDelta

_FRESH_S = 0.25  # as often as stubs publish: who asks more often gets the same page
_LIMIT_S = 2.0  # for Triton's page
_LEVEL = re.compile(r'^(bireme_\w+)\{worker="([^"]+)"\} (\S+)$', re.MULTILINE)
_ADDED = ("bireme_requests_running", "bireme_requests_waiting")
_BATCH = "bireme_engine_max_batch_size"  # decode's, or embedding's
_STAGES = (*ROUTED_STAGES, "embedding")
_USED, _BLOCKS, _BLOCK = "bireme_kv_blocks_used", "bireme_kv_blocks_total", "bireme_kv_block_tokens"


class WholePage:
    """Asked from any thread; one at a time reads."""

    def __init__(self, aliases: Aliases, read: Callable[[], str]) -> None:
        """`read` returns Triton's page, or raises BiremeError."""
        self._aliases, self._read = aliases, read
        self._lock = threading.Lock()
        self._text, self._failure = b"", ""
        self._read_at = -_FRESH_S

    def text(self) -> bytes:
        """Raises BiremeError while Triton does not answer."""
        with self._lock:
            if time.monotonic() - self._read_at >= _FRESH_S:
                self._renew()
                self._read_at = time.monotonic()
            if self._failure:
                raise UnavailableError(self._failure)
            return self._text

    def _renew(self) -> None:
        """What fails is kept like a page: who waits for the lock need not wait for Triton, too."""
        try:
            self._text, self._failure = self._made(self._read()), ""
        except BiremeError as error:
            self._failure = str(error)

    def _made(self, page: str) -> bytes:
        levels = whole_levels(page)
        made = self._aliases.translate(MetricDelta([], [(name, ("",), value) for name, value in levels.items()], []))
        lines, told = [], set[str]()
        for name, labels, value in made.gauges:
            spec = self._aliases.specs[name]
            if name not in told:
                lines.append(f"# HELP {name} {spec.help}\n# TYPE {name} gauge")
                told.add(name)
            pairs = ",".join(f'{label}="{one}"' for label, one in zip(spec.labels, labels, strict=True))
            lines.append(f"{name}{{{pairs}}} {value:.10g}")
        return "".join(f"{line}\n" for line in lines).encode()


def gateways_page(recipe: Recipe, server: Callable[[], Server | None]) -> Callable[[], bytes] | None:
    """Return what makes the page of the server that runs when it is asked; None: the recipe asks for no names."""

    def read() -> str:
        if (running := server()) is None:
            raise UnavailableError("tritonserver has not started yet")
        return running.admin.metrics_text(_LIMIT_S)

    aliases = aliases_of_launch(recipe)
    return WholePage(aliases, read).text if aliases is not None else None


_Levels = dict[str, list[float]]  # of a stage's workers, by name


def whole_levels(page: str) -> dict[str, float]:
    """Return the levels of all workers that serve text together, by the names of Triton's page; {}: there is none."""
    stages: dict[str, _Levels] = {}
    for name, worker, value in _LEVEL.findall(page):
        if (stage := stage_of(worker)) in _STAGES:
            stages.setdefault(stage, {}).setdefault(name, []).append(float(value))
    if not stages:
        return {}
    added = {name: sum(sum(levels.get(name, ())) for levels in stages.values()) for name in _ADDED}
    added[_BATCH] = sum((stages.get("decode") or stages.get("embedding") or {}).get(_BATCH, ()))
    return added | _pool({stage: one for stage, one in stages.items() if one.keys() >= {_USED, _BLOCKS, _BLOCK}})


def _pool(stages: dict[str, _Levels]) -> dict[str, float]:
    """Return the blocks of the stage that computes prompts, in use as far as those of the fullest stage."""
    if not stages:
        return {}
    own = stages.get("prefill") or stages.get("decode") or stages["embedding"]
    share = max(sum(one[_USED]) / max(sum(one[_BLOCKS]), 1.0) for one in stages.values())
    return {_USED: share * sum(own[_BLOCKS]), _BLOCKS: sum(own[_BLOCKS]), _BLOCK: max(own[_BLOCK])}
