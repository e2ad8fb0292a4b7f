"""Compiles guides off the engine's loop: a cache, a bounded queue, and a few threads with a helper process each.

Equal waiting guides are compiled once. A failure is remembered for a minute: a repeated one costs a look-up.
"""

from __future__ import annotations

import collections
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bireme.config import GuidedDecodingConfig
from bireme.errors import BiremeError, RequestError, ResourceExhaustedError, UnavailableError
from bireme.guides import Guide
from bireme.logits.guided.compile_client import CompileClient
from bireme.logits.guided.vocabulary import TokenTable, View

logger = logging.getLogger("bireme.logits")
_FAILURE_S = 60.0  # how long a failure is remembered
_MAX_FAILURES = 1024
_VIEWS: dict[str, View] = {"structural_tag": "marked", "json": "json", "json_object": "json"}
Compiled = Any  # xgrammar.CompiledGrammar
Done = Callable[[Compiled | BiremeError], None]  # from any thread; must be quick and not raise


@dataclass(slots=True)
class Counts:
    hits: int = 0
    compiled: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Job:
    guide: Guide
    waiting: list[Done]


class GuideCompiler:
    """One engine's. `compile` may be called from any thread."""

    def __init__(
        self, load_table: Callable[[], TokenTable], stop_ids: Iterable[int], config: GuidedDecodingConfig
    ) -> None:
        """`load_table` is called once, on a thread of the compiler."""
        self._load_table = load_table
        self._table: TokenTable | None = None
        self.counts = Counts()
        self._stop_ids = tuple(stop_ids)
        self._config = config
        self._lock = threading.Condition()
        self._cache: collections.OrderedDict[bytes, tuple[Compiled, int]] = collections.OrderedDict()
        self._cached_bytes = 0
        self._failures: collections.OrderedDict[bytes, tuple[BiremeError, float]] = collections.OrderedDict()
        self._jobs: collections.OrderedDict[bytes, _Job] = collections.OrderedDict()  # waiting or being compiled
        self._queue: collections.deque[bytes] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._clients: list[CompileClient] = []
        self._num_idle = 0
        self._infos: dict[View, tuple[Any, str]] = {}
        self._info_lock = threading.Lock()
        self._is_closed = False

    @property
    def table(self) -> TokenTable:
        """Set when the first guide was compiled."""
        assert self._table is not None, "nothing has been compiled"
        return self._table

    def compile(self, guide: Guide, done: Done) -> None:
        """Call `done` with the compiled grammar or the error, at once if that is known."""
        answer: Compiled | BiremeError | None
        with self._lock:
            answer = self._known(guide.grammar_key) or self._enqueue(guide, done)
        if answer is not None:
            done(answer)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._queue.clear()
            self._lock.notify_all()
            clients = list(self._clients)
        for client in clients:
            client.kill()
        for job in jobs:
            _tell(job, UnavailableError("the engine is stopping; send it to another worker, or try again"))

    def _known(self, key: bytes) -> Compiled | BiremeError | None:
        if (found := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self.counts.hits += 1
            return found[0]
        error, until = self._failures.get(key, (None, 0.0))
        return error if error is not None and time.monotonic() < until else None

    def _enqueue(self, guide: Guide, done: Done) -> BiremeError | None:
        if self._is_closed:
            return UnavailableError("the engine is stopping; send it to another worker, or try again")
        key, limit = guide.grammar_key, self._config.max_queue_size
        if (job := self._jobs.get(key)) is not None:
            job.waiting.append(done)
            return None
        if len(self._queue) >= limit:
            return ResourceExhaustedError(
                f"guided_decoding: {len(self._queue)} guides wait to be compiled;"
                f" guided_decoding_config.max_queue_size is {limit}; try again later"
            )
        self._jobs[key] = _Job(guide, [done])
        self._queue.append(key)
        if self._num_idle:
            self._lock.notify()
        elif len(self._threads) < self._config.num_processes:
            self._add_thread()
        return None

    def _add_thread(self) -> None:
        client = CompileClient()
        thread = threading.Thread(target=self._run, args=(client,), name="guide-compiler", daemon=True)
        self._clients.append(client)
        self._threads.append(thread)
        thread.start()

    def _keep(self, key: bytes, compiled: Compiled, num_bytes: int) -> None:
        self.counts.compiled += 1
        self._cache[key] = compiled, num_bytes
        self._cached_bytes += num_bytes
        while self._cached_bytes > self._config.cache_bytes and len(self._cache) > 1:
            _, (_, freed) = self._cache.popitem(last=False)
            self._cached_bytes -= freed

    def _remember(self, key: bytes, error: BiremeError) -> None:
        self.counts.failed += 1
        self._failures.pop(key, None)
        if isinstance(error, RequestError):
            self._failures[key] = error, time.monotonic() + _FAILURE_S
        if len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    def _run(self, client: CompileClient) -> None:
        while (job := self._take()) is not None:
            began = time.monotonic()
            answer, num_bytes = self._answer(client, job.guide)
            self._finish(job, answer, num_bytes, time.monotonic() - began)
        client.close()

    def _take(self) -> _Job | None:
        with self._lock:
            while not self._queue and not self._is_closed:
                self._num_idle += 1
                self._lock.wait()
                self._num_idle -= 1
            return None if self._is_closed else self._jobs[self._queue.popleft()]

    def _answer(self, client: CompileClient, guide: Guide) -> tuple[Compiled | BiremeError, int]:
        try:
            return self._compile(client, guide)
        except BiremeError as error:
            return error, 0
        except Exception as error:
            logger.exception("guide_failed kind=%s bytes=%d", guide.kind, len(guide.text))
            return BiremeError(f"guided_decoding: {type(error).__name__}: {error}"), 0

    def _compile(self, client: CompileClient, guide: Guide) -> tuple[Compiled, int]:
        view = _VIEWS.get(guide.kind, "plain")
        client.begin()  # it starts while xgrammar is imported here and the vocabulary is read
        info, text = self._info(view)
        config = self._config
        request = {"view": view, "kind": guide.kind, "text": guide.text, "any_whitespace": config.any_whitespace}
        data = client.compile(request, text, config.compile_timeout_s, config.max_compiled_bytes)
        from xgrammar import CompiledGrammar

        compiled = CompiledGrammar.deserialize_json(data.decode(), info)
        return compiled, max(1024, int(compiled.memory_size_bytes))

    def _info(self, view: View) -> tuple[Any, str]:
        """Return a view of the vocabulary, also as text for helpers."""
        with self._info_lock:
            if view not in self._infos:
                from xgrammar import TokenizerInfo

                self._table = self._table or self._load_table()
                tokens = self._table.view(view, self._stop_ids)
                info = TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=list(self._stop_ids))
                self._infos[view] = info, info.serialize_json()
            return self._infos[view]

    def _finish(self, job: _Job, answer: Compiled | BiremeError, num_bytes: int, seconds: float) -> None:
        key = job.guide.grammar_key
        with self._lock:
            if self._jobs.pop(key, None) is None:
                return  # closed meanwhile: their callers know
            if isinstance(answer, BiremeError):
                self._remember(key, answer)
            else:
                self._keep(key, answer, num_bytes)
        outcome = answer.code if isinstance(answer, BiremeError) else "ok"
        told = (job.guide.kind, len(job.guide.text), num_bytes, seconds, outcome)
        logger.info("guide_compiled kind=%s source_bytes=%d compiled_bytes=%d seconds=%.3f outcome=%s", *told)
        _tell(job, answer)


def is_installed() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


def _tell(job: _Job, answer: Compiled | BiremeError) -> None:
    for done in job.waiting:
        try:
            done(answer)
        except Exception:  # one request's defect: the others still get the result
            logger.exception("guide_answer_failed")
