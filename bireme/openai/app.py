"""The ASGI application: who may call what, within which limits, and a log line for each request.

Decisions look only at the decoded path. A path outside the table of routes is refused; without a key (where keys are
set) everything is refused but OPEN_PATHS and the playground's files. Where none are set, so is what other sites' pages
send: the Host and Origin headers decide nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from bireme import __version__
from bireme.config import FrontendConfig
from bireme.discovery import live_settings
from bireme.discovery.pulse import own_pulse
from bireme.errors import BiremeError, drop_frames
from bireme.metric_aliases import Aliases, aliases_of_frontend
from bireme.metrics import MetricDelta, Registry, limits_of
from bireme.observability.timelines import Timelines
from bireme.observability.traces import Traces
from bireme.openai.accounts import AccountNames, Accounts
from bireme.openai.batch.line_gate import Endpoint
from bireme.openai.batch.routes import FileRoutes
from bireme.openai.call_traces import CallTraces, note_failure
from bireme.openai.followed_files import FollowedFiles
from bireme.openai.http.browser_guard import BrowserGuard
from bireme.openai.http.call import JSON_ONLY, Call, ClientGoneError, Handler, Post, Receive, Scope, Send
from bireme.openai.http.error_replies import HttpError, RateLimitError, anthropic_reply_of, is_internal, shutting_down
from bireme.openai.http.members import Answer, Member
from bireme.openai.http.pace import Pacer
from bireme.openai.keys import KEY_HEADERS, OPEN, ApiKeys
from bireme.openai.live.feed import LIVE, LiveFeed
from bireme.openai.live.source import LiveSource
from bireme.openai.live.timeline_route import TIMELINE, TimelineRoute
from bireme.openai.metrics_page import CONTENT_TYPE, KeptPages, MetricsPage
from bireme.openai.mirror.mirror import Mirror
from bireme.openai.model_kinds import ModelsByName
from bireme.openai.openapi import RERANK_PATHS, SCORE_PATHS, openapi
from bireme.openai.playground_files import packaged_files
from bireme.openai.readiness import Readiness
from bireme.openai.store_thread import StoreThread
from bireme.openai.text.answering import Streams
from bireme.openai.text.chat_completions import ChatCompletions
from bireme.openai.text.completions import Completions
from bireme.openai.text.embedding_model import EmbeddingModels
from bireme.openai.text.embeddings import Embeddings
from bireme.openai.text.messages import Messages
from bireme.openai.text.model_object import anthropic_model, anthropic_page, openai_model
from bireme.openai.text.responses import Responses
from bireme.openai.text.served_model import FollowedModel, Models
from bireme.openai.text.stored_responses import StoredResponses
from bireme.openai.text.tokenization import Tokenization
from bireme.openai.video.routes import VideoRoutes
from bireme.openai.video.served_video import VideoModels
from bireme.pipelines.chat_answer import encode_json

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
_MODEL_PATH = "/v1/models/"
_TRACED_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/batches"),
        *("/v1/videos", "/v1/videos/generations", "/v1/images/generations", *SCORE_PATHS, *RERANK_PATHS),
    }
)
_ANTHROPIC_VERSION = b"anthropic-version"  # a header that Anthropic's clients send and no others
_MESSAGES_PATH = "/v1/messages"  # it and all below speak Anthropic's API
_GONE = 499  # in log and metrics: the client left before the reply
_FORBIDDEN_IN_HOST = frozenset(b"/?#@\\ \t")
_NUM_TICKS = 4  # comments are at most a quarter of their interval late
logger = logging.getLogger("bireme.openai")
access = logging.getLogger("bireme.access")


class Frontend:
    """One process's application. Made before the loop runs; `start` and `stop` by the server's lifespan."""

    def __init__(
        self, models: Models, metrics: Registry, config: FrontendConfig | None = None, keys: ApiKeys | None = None,
        member: Member | None = None, videos: VideoModels | None = None, responses_folder: Path | None = None,
        files_folder: Path | None = None, followed: Sequence[FollowedFiles] = (),
        embedders: EmbeddingModels | None = None, bound_to: str = "127.0.0.1", run_dir: Path | None = None,
        traces: Traces | None = None, timelines: Timelines | None = None,
    ) -> None:  # fmt: skip
        """`member`: other processes serve the same port. The folders are of kept responses, and of files and batches;
        None: they go with this process. `followed`: looked at while it serves. `bound_to`: what the port listens on.
        `run_dir`: of the launch; None: out of reach. `traces`: None: nobody reads any. `timelines`:
        None: none are kept.
        """
        self._videos = videos or VideoModels()
        self._embedders = embedders or EmbeddingModels()
        self._kinds: tuple[ModelsByName[Any], ...] = (models, self._videos, self._embedders)
        for kind in self._kinds:
            kind.know_others({one.name: other.kind for other in self._kinds if other is not kind for one in other})
        self._models, self._metrics, self._keys = models, metrics, keys
        self._member, self._run_dir = member, run_dir
        self._traces = CallTraces(traces) if traces is not None else None
        self._teller: asyncio.AbstractServer | None = None
        self._config = config or FrontendConfig()
        self._video_routes = VideoRoutes(self._videos, metrics, self._config.comment_interval_s)
        self._stored = StoredResponses(self._config, models, keys, responses_folder, self._traces)
        self._files_folder = files_folder
        self._followed, self._tasks = followed, list[asyncio.Task[None]]()
        self._files: FileRoutes | None = None
        self._names: AccountNames | None = None
        self._served: list[FollowedModel] = [*models, *self._embedders]
        self._aliases = _aliases_of(self._served, metrics.worker)
        self._page = MetricsPage(metrics, {model.services.metrics: one for model, one in self._aliases.items()})
        self._pages = KeptPages()
        self._open_accounts()
        self._live_feed: LiveFeed | None = None
        self._timelines = TimelineRoute(timelines, member)
        self._playground = packaged_files() if self._config.playground else None
        self._playground_paths = self._playground.paths if self._playground else frozenset()
        self._open_paths = OPEN_PATHS | self._playground_paths
        self._browsers = BrowserGuard(bound_to, self._config.allowed_hosts)
        self._mirror = Mirror(metrics, run_dir)
        self._streams: Streams = set()
        self._routes: dict[str, dict[str, Handler]] = {}
        self._pulse: asyncio.Task[None] | None = None
        self._num_active = 0
        self.readiness: Readiness | None = None

    def _open_accounts(self) -> None:
        """Where keys have accounts, or Dynamo's names are asked for."""
        for model in self._served:
            limit = model.recipe.metrics.max_accounts if self._keys is not None else 0
            if self._keys is not None and limit and self._names is None:
                self._names = AccountNames(self._keys, limit)
            if limit or model in self._aliases:
                model.services.observer = Accounts(model.services.metrics, self._names, model in self._aliases)

    async def start(self) -> None:
        pacer = Pacer()
        followed = self._served
        for model in followed:
            model.start()
        chats = ChatCompletions(self._models, pacer, self._streams)
        completions = Completions(self._models, pacer, self._streams)
        responses = Responses(self._models, self._stored, pacer, self._streams)
        messages = Messages(self._models, pacer, self._streams)
        tokens = Tokenization(self._models)
        embeddings = Embeddings(self._embedders)
        endpoints = {
            "/v1/chat/completions": Endpoint(chats.post, self._models.get),
            "/v1/completions": Endpoint(completions.post, self._models.get),
            "/v1/responses": Endpoint(responses.post, self._models.get),
            "/v1/embeddings": Endpoint(embeddings.embed, self._embedders.get),
        }
        self._files = FileRoutes(
            self._config, self._files_folder, endpoints, lambda: self._keys, self._metrics,
            lines_rest=all(model.rests_lines for model in followed), traces=self._traces,
        )  # fmt: skip
        gate = self._files.gate
        stores: list[StoreThread[Any]] = [
            self._stored.store,
            self._files.store,
            *(video.store for video in self._videos),
        ]
        self.readiness = Readiness(followed, self._videos, stores, self._run_dir)
        self._routes = {
            **{path: {"POST": self._with_body(gate.live(one.post))} for path, one in endpoints.items()},
            _MESSAGES_PATH: {"POST": self._with_body(gate.live(messages.post))},
            f"{_MESSAGES_PATH}/count_tokens": {"POST": self._with_body(messages.count)},
            "/v1/responses/input_tokens": {"POST": self._with_body(responses.count)},
            **{path: {"POST": self._with_body(gate.live(embeddings.score))} for path in SCORE_PATHS},
            **{path: {"POST": self._with_body(gate.live(embeddings.rerank))} for path in RERANK_PATHS},
            **self._stored.routes(self._with_body),
            "/tokenize": {"POST": self._with_body(tokens.tokenize)},
            "/detokenize": {"POST": self._with_body(tokens.detokenize)},
            "/v1/models": {"GET": self._list_models},
            "/health/live": {"GET": self._live},
            "/health/ready": {"GET": self._ready},
            "/health": {"GET": self._ready},  # vLLM's name, which load generators ask first
            "/ping": {"GET": self._ready, "POST": self._ready},  # SageMaker's
            "/version": {"GET": self._show_version},
            "/metrics": {"GET": self._show_metrics},
            "/openapi.json": {"GET": self._show_openapi},
            **self._files.routes(self._limited, self._with_body),
            **self._video_routes.routes(self._with_body),
            **self._live_routes(followed, self.readiness),
        }
        await self._video_routes.start()
        self._stored.start()
        self._files.start()
        work = [self._tick(), *map(FollowedFiles.run, self._followed)]
        self._tasks = [asyncio.get_running_loop().create_task(one) for one in work]
        if (pulse := own_pulse()) is not None:
            self._pulse = asyncio.get_running_loop().create_task(pulse.run())
        if self._member is not None:
            answers: dict[str, Answer] = {TIMELINE: self._timelines.answer}
            if (live := self._live_feed) is not None:
                answers[LIVE] = lambda _: live.part()
            self._teller = await self._member.tell(self._totals, answers)

    def _live_routes(self, models: Sequence[FollowedModel], readiness: Readiness) -> dict[str, dict[str, Handler]]:
        if not self._config.live_viewers:
            return {}
        source = LiveSource(models, self._page.totals)
        self._live_feed = LiveFeed(
            source, self._member, self._config.live_viewers,
            lambda: readiness.is_draining or readiness.is_asked_to_drain,
        )  # fmt: skip
        return {"/v1/live": {"GET": self._live_feed.get}}

    async def stop(self) -> None:
        if self._live_feed is not None:
            self._live_feed.close()
        if self._teller is not None:
            self._teller.close()
        for task in self._tasks:
            task.cancel()
        self._mirror.close()
        await self._video_routes.stop()
        await self._stored.stop()
        if self._files is not None:
            await self._files.stop()
        await asyncio.gather(*(model.close() for model in (*self._models, *self._embedders)))
        if self._traces is not None:
            await self._traces.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] == "http":
            await self._serve(Call(scope, receive, send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, call: Call) -> None:
        """Answer whatever happens; then count and log."""
        if call.path.startswith(_MESSAGES_PATH):
            call.speak(anthropic_reply_of, b"request-id")
        self._num_active += 1
        try:
            await self._answer(call)
        except ClientGoneError as error:
            call.status = _GONE
            if call.trace is not None:
                note_failure(call.trace, asyncio.CancelledError())
            call.drop()
            drop_frames(error)
        finally:
            self._num_active -= 1
            self._count(call)
            if call.original is not None:
                self._mirror.end(call)
            if self._traces is not None and call.trace is not None:
                self._traces.end(call)

    async def _answer(self, call: Call) -> None:
        """Raises ClientGoneError, and what came too late to be told."""
        try:
            await self._dispatch(call)
        except ClientGoneError:
            raise
        except asyncio.CancelledError as error:  # by uvicorn, when the drain timeout has passed
            drop_frames(error)
            if not call.status:
                await self._refuse(call, shutting_down())
        except Exception as error:
            if not (isinstance(error, HttpError) and error.status == HTTPStatus.REQUEST_TIMEOUT):
                await call.discard_body()
            was_told = await self._refuse(call, error)
            drop_frames(error)
            if not was_told:  # uvicorn closes the connection
                raise

    async def _dispatch(self, call: Call) -> None:
        _check_host(call)
        if not (call.path in self._open_paths or self._video_routes.is_open(call.path)):
            if self._keys is None:
                self._browsers.check(call)
            else:
                call.tenant = self._keys.tenant(*_keys_in(call))
        methods = self._methods(call.path)
        handler = methods.get("GET" if call.method == "HEAD" else call.method)
        if handler is None:
            allowed = ", ".join(methods).encode()
            raise HttpError(405, f"{call.method[:16]}: send {allowed.decode()}", headers=((b"allow", allowed),))
        if self._traces is not None and call.method == "POST" and call.path in _TRACED_PATHS:
            self._traces.begin(call)
        await handler(call)

    def _methods(self, path: str) -> dict[str, Handler]:
        if self._playground is not None and path in self._playground_paths:
            return {"GET": self._playground.get}
        methods = self._routes.get(path)
        if methods is None and path.startswith(_MODEL_PATH):
            return {"GET": self._show_model}
        methods = methods or self._match(path)
        if methods is None:
            raise HttpError(404, "no such path; GET /openapi.json lists what there is", code="not_found")
        return methods

    def _match(self, path: str) -> dict[str, Handler] | None:
        """Return the methods of a path with an id or a name in it."""
        found = self._timelines.match(path) or self._video_routes.match(path)
        found = found or self._stored.match(path, self._with_body)
        return found or (self._files.match(path) if self._files is not None else None)

    async def _refuse(self, call: Call, error: Exception) -> bool:
        """Log what only the log may show, and tell the caller; false: it is too late for that."""
        if isinstance(error, RateLimitError):
            self._metrics.add("bireme_rate_limited_total", 1, call.tenant.name)
        if is_internal(error):
            details = None if isinstance(error, BiremeError) else error
            logger.error("request_failed %s error=%s", call.shown_ids, error, exc_info=details)
        if call.trace is not None:
            note_failure(call.trace, error)
        if call.status:
            return False
        reply = call.error_reply(error)
        await call.reply(reply.status, reply.body, *reply.headers)
        return True

    def _with_body(self, post: Post, kinds: tuple[bytes, ...] = JSON_ONLY) -> Handler:

        async def handle(call: Call) -> None:
            data = await call.body(self._config.max_body_bytes, self._config.body_timeout_s, kinds)
            if live_settings.current().mirror is not None:
                self._mirror.begin(call, data)
            await post(call, data)

        return self._limited(handle)

    def _limited(self, handler: Handler) -> Handler:

        async def handle(call: Call) -> None:
            if self._num_active > self._config.max_connections:
                raise HttpError(
                    503, f"frontend.max_connections {self._config.max_connections} are busy; try again",
                    "server_error", "overloaded", ((b"retry-after", b"1"),),
                )  # fmt: skip
            call.tenant.begin()
            try:
                await handler(call)
            finally:
                call.tenant.end()

        return handle

    async def _list_models(self, call: Call) -> None:
        models = [model for kind in self._kinds for model in kind]
        if call.header(_ANTHROPIC_VERSION):
            call.speak(anthropic_reply_of, b"request-id")
            await call.reply(200, encode_json(anthropic_page([anthropic_model(model) for model in models], call)))
            return
        await call.reply(200, encode_json({"object": "list", "data": [openai_model(model) for model in models]}))

    async def _show_model(self, call: Call) -> None:
        name, form = call.path.removeprefix(_MODEL_PATH), openai_model
        if call.header(_ANTHROPIC_VERSION):
            call.speak(anthropic_reply_of, b"request-id")
            form = anthropic_model
        kind = next((kind for kind in self._kinds if name in kind), self._models)
        await call.reply(200, encode_json(form(kind.get(name))))

    async def _live(self, call: Call) -> None:
        await call.reply(200, b'{"status":"live"}')

    async def _ready(self, call: Call) -> None:
        assert self.readiness is not None
        is_ready, report = await self.readiness.report()
        shown = report if self._is_operator(call) else {"status": report["status"]}
        await call.reply(200 if is_ready else 503, encode_json(shown))

    def _is_operator(self, call: Call) -> bool:
        """Return whether the caller may know of workers; on a path that is open to everybody."""
        try:
            return self._keys is None or self._keys.tenant(*_keys_in(call)).is_operator
        except HttpError:
            return False

    async def _show_version(self, call: Call) -> None:
        await call.reply(200, encode_json({"version": __version__}))

    async def _show_metrics(self, call: Call) -> None:
        only_key = None if call.tenant.is_operator else call.tenant.name
        page = await self._pages.get(only_key, partial(self._gather_metrics, only_key))
        await call.reply(200, page, (b"content-type", CONTENT_TYPE))

    async def _gather_metrics(self, only_key: str | None) -> Callable[[], bytes]:
        """Return what writes the page."""
        self._note_levels()
        others = await self._member.ask_totals() if self._member is not None else []
        assert self.readiness is not None
        is_ready, _ = await self.readiness.report()  # asks the workers, at most once a second
        level = ("bireme_frontend_ready", (self._metrics.worker,), float(is_ready))
        return partial(self._page.text, others, only_key, [MetricDelta([], [level], []), *self._limits()])

    def _limits(self) -> Iterator[MetricDelta]:
        """Yield what a worker of each model takes, under other names; on workers' own page it has ours."""
        for model, aliases in self._aliases.items():
            if (capacity := model.capacity) is not None:
                limits = limits_of(capacity, self._metrics.worker)
                limits.gauges.append(("bireme_kv_blocks_total", (self._metrics.worker,), capacity.num_blocks))
                yield aliases.translate(limits)

    def _totals(self) -> MetricDelta:
        self._note_levels()
        return self._page.totals()

    def _note_levels(self) -> None:
        self._metrics.set("bireme_http_requests_active", self._num_active)
        for model in self._served:
            services = model.services
            services.metrics.set("bireme_model_requests_active", services.num_active, model.name)
            if model in self._aliases and isinstance(services.observer, Accounts):
                services.metrics.set("bireme_model_requests_queued", services.observer.num_queued, model.name)

    async def _show_openapi(self, call: Call) -> None:
        await call.reply(200, encode_json(openapi(*([model.name for model in kind] for kind in self._kinds))))

    def _count(self, call: Call) -> None:
        path = call.path if call.path in self._routes else "/" if call.path in self._playground_paths else "other"
        if not call.is_canary:
            self._metrics.add("bireme_http_requests_total", 1, path, str(call.status))
        if call.path not in OPEN_PATHS and access.isEnabledFor(logging.INFO):  # probes come each second
            access.info(_log_line(call))

    async def _tick(self) -> None:
        interval_s = self._config.comment_interval_s
        while True:
            await asyncio.sleep(interval_s / _NUM_TICKS)
            now = time.monotonic()
            for stream in [stream for stream in self._streams if now - stream.written_at >= interval_s]:
                stream.comment()


def _aliases_of(models: Sequence[FollowedModel], worker: str) -> dict[FollowedModel, Aliases]:
    found = {model: aliases_of_frontend(model.recipe, worker) for model in models}
    return {model: aliases for model, aliases in found.items() if aliases is not None}


def _keys_in(call: Call) -> list[list[bytes]]:
    return [[value for key, value in call.headers if key == name] for name in KEY_HEADERS]


def _check_host(call: Call) -> None:
    """Refuse a Host that a proxy and a client library could read differently."""
    if call.is_repeated(b"host") or not _FORBIDDEN_IN_HOST.isdisjoint(call.header(b"host")):
        raise HttpError(400, "host: send one Host header with a name or address and a port", code="invalid_host")


def _log_line(call: Call) -> str:
    fields: dict[str, object] = {
        "method": call.method,
        "path": call.path,
        "status": call.status,
        "seconds": f"{time.monotonic() - call.arrived_at:.4f}",
        "request_id": call.request_id.decode(),
    }
    if call.tenant is not OPEN:
        fields["key"] = call.tenant.name
    return "request " + " ".join(f"{name}={_value(value)}" for name, value in (fields | call.notes).items())


def _value(value: object) -> str:
    text = str(value)
    return (
        text
        if text.isascii() and text.isprintable() and text and not set(text) & {" ", '"', "="}
        else json.dumps(text[:200])
    )
