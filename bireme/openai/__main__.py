"""Serve OpenAI's API for one or several tritonservers.

    python -m bireme.openai --recipe recipes/tiny-chat                       # BIREME_GRPC, else 127.0.0.1:8001
    python -m bireme.openai --recipe recipes/a --grpc host1:8001 --recipe recipes/b --grpc host2:8001 --port 9000
    python -m bireme.openai --recipe recipes/a --discovery etcd://host:2379  # every server that registers there

SIGTERM: no new connections, running requests get --drain-timeout seconds, then an error, then exit code 0.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from bireme.config import FrontendConfig, Recipe
from bireme.discovery import live_settings
from bireme.discovery.store import with_discovery
from bireme.errors import ConfigError
from bireme.launch.processes import started_at
from bireme.launch.run_folder import FILES, RESPONSES
from bireme.metric_aliases import aliases_of_frontend
from bireme.metrics import Registry, use_buckets
from bireme.observability.entry import open_timelines, open_traces
from bireme.openai.app import Frontend
from bireme.openai.followed_files import FollowedFiles
from bireme.openai.http.connection import Connection
from bireme.openai.http.group_folder import leave, wait_for_successor
from bireme.openai.http.idle_connections import IdleConnections, raise_descriptors
from bireme.openai.http.members import Member, shared_socket
from bireme.openai.http.process_group import run_group
from bireme.openai.http.tls import TlsFiles
from bireme.openai.keys import ApiKeys, load_keys, read_keys
from bireme.openai.logs import set_up_logs
from bireme.openai.text.embedding_model import EmbeddingModel, EmbeddingModels
from bireme.openai.text.served_model import Models, ServedModel
from bireme.openai.video.served_video import VideoModels, connect_video
from bireme.own_process import freeze_gc, reuse_memory, watch_parent
from bireme.recipe_files import load_recipe
from bireme.workers.grpc import server_address

WRONG = 2
_BACKLOG = 2048
logger = logging.getLogger("bireme.openai")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    set_up_logs(options.log_level, options.json_logs, options.access_log)
    if options.parent:
        watch_parent(_end_as_orphan(options.member, options.launch), options.parent)
    if options.processes > 1 and options.member is None:
        given = sys.argv[1:] if arguments is None else arguments
        return run_group(given, options.processes, options.parent, options.drain_timeout)
    try:
        server = make_server(options)
        listeners = [shared_socket(options.host, options.port)] if options.member else None
    except (ConfigError, OSError) as error:
        logger.error("%s", error)
        return WRONG
    freeze_gc(collect_less=True)
    reuse_memory()
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn drains, then raises the signal once more
        signal.signal(number, lambda *_: None)
    server.run(listeners)
    if options.member is not None:
        leave(options.member.folder)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bireme.openai", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", action="append", help="folder with recipe.yaml; one for each --grpc")
    parser.add_argument("--grpc", action="append", metavar="HOST:PORT", help="a tritonserver's gRPC endpoint")
    parser.add_argument(
        "--discovery", metavar="ADDRESS",
        help="where servers of the recipes register: a folder, or etcd://host:2379; no --grpc is needed then",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 opens it to the network")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument(
        "--processes",
        type=_positive,
        default=1,
        metavar="N",
        help="that share the port; more than 1 once a core is full",
    )
    parser.add_argument("--api-keys", metavar="FILE", help="over frontend.api_keys of the first recipe")
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="certificate chain in PEM: serve https; read again on a change"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its key in PEM, without a password")
    parser.add_argument("--drain-timeout", type=int, default=30, metavar="S", help="for requests at the end")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--json-logs", action="store_true", help="one JSON object a line")
    parser.add_argument("--no-access-log", dest="access_log", action="store_false")
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)  # end when this process does
    parser.add_argument("--launch", type=int, default=0, help=argparse.SUPPRESS)  # starts the next group of processes
    parser.add_argument("--member", type=Member.parse, help=argparse.SUPPRESS)  # which of --processes this one is
    return parser.parse_args(arguments)


def _end_as_orphan(member: Member | None, launch: int) -> Callable[[], None]:
    """Return what ends this process after its parent's death: as soon as it is not needed any more."""
    began_at = started_at(launch) if launch else None

    def end() -> None:
        try:
            if member is not None and launch:
                wait_for_successor(member.folder, launch, began_at)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    return end


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}; the least is 1")
    return number


def make_server(options: argparse.Namespace) -> uvicorn.Server:
    """Return a server that is ready to run. Raises ConfigError."""
    override = with_discovery(os.environ.get("BIREME_OVERRIDE", ""), options.discovery)
    recipes = [load_recipe(path, override) for path in options.recipe or [None]]
    _use_buckets(recipes)
    served = list(zip(recipes, _addresses(options.grpc, recipes), strict=True))
    metrics, tls = Registry("frontend"), _tls(options.tls_cert, options.tls_key)
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"{'https' if tls else 'http'}://{host}:{options.port}"

    def having(stage: str) -> list[tuple[Recipe, str | None]]:
        return [(recipe, address) for recipe, address in served if stage in recipe.workers]

    def own_metrics(recipe: Recipe) -> Registry:
        """Other names tell models apart."""
        return metrics if aliases_of_frontend(recipe, metrics.worker) is None else Registry(metrics.worker)

    models = Models([ServedModel.connect(*one, own_metrics(one[0])) for one in having("decode")])
    embedders = EmbeddingModels([EmbeddingModel.connect(*one, own_metrics(one[0])) for one in having("embedding")])
    videos = VideoModels(
        [connect_video(recipe, at, metrics, url) for recipe, at in having("video_diffusion") if at is not None]
    )
    config = recipes[0].frontend
    keys, followed = _keys(options.api_keys, recipes[0], options.member)
    responses = _kept_folder(recipes[0], config.responses.folder, RESPONSES, options.member)
    files = _kept_folder(recipes[0], config.files.folder, FILES, options.member)
    run_dir = Path(named) if (named := os.environ.get("BIREME_RUN_DIR")) else None
    followed += [tls.followed] if tls else []
    followed += [_live_settings(run_dir)] if run_dir else []
    timelines = open_timelines(recipes[0])
    frontend = Frontend(models, metrics, config, keys, options.member, videos, responses, files, followed, embedders,
                        options.host, run_dir, open_traces(recipes[0], metrics, timelines), timelines)  # fmt: skip
    return _Server(_uvicorn_config(frontend, options, config, tls), frontend, options.member)


def _live_settings(run_dir: Path) -> FollowedFiles:
    followed = FollowedFiles(
        "live_settings", [run_dir / live_settings.FILE_NAME], lambda: live_settings.look(run_dir), lambda _: None
    )
    live_settings.look(run_dir)
    return followed


def _use_buckets(recipes: list[Recipe]) -> None:
    first = recipes[0]
    for other in recipes[1:]:
        if other.metrics.buckets != first.metrics.buckets:
            raise ConfigError(
                f"{other.folder}/recipe.yaml: metrics.buckets: not those of {first.name}; recipes of one frontend share"
                " its histograms, give them the same"
            )
    use_buckets(first.metrics.buckets)


def _tls(cert: str | None, key: str | None) -> TlsFiles | None:
    if bool(cert) != bool(key):
        raise ConfigError("--tls-cert and --tls-key belong together; give both, or none")
    return TlsFiles(Path(cert), Path(key)) if cert and key else None


def _addresses(given: list[str] | None, recipes: list[Recipe]) -> list[str | None]:
    """Return each recipe's own server; None: discovery has them all. Raises ConfigError."""
    if given is not None and len(recipes) != len(given):
        raise ConfigError(f"{len(recipes)} --recipe, {len(given)} --grpc; give one --grpc for each recipe")
    addresses: list[str | None] = []
    for at, recipe in enumerate(recipes):
        addresses.append(given[at] if given else None if recipe.discovery.is_shared else server_address())
        if addresses[-1] is None and not recipe.workers.keys() & {"decode", "embedding"}:
            raise ConfigError(f"{recipe.name}: videos are made on one server; give its --grpc")
    return addresses


class _Server(uvicorn.Server):
    """Logs that it serves, and that it drains as soon as it is asked to stop."""

    def __init__(self, config: uvicorn.Config, frontend: Frontend, member: Member | None) -> None:
        super().__init__(config)
        self._frontend, self._member = frontend, member

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if self._member is not None and self.started:
            self._member.note_serving()

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        if self._frontend.readiness is not None:
            self._frontend.readiness.is_draining = True
        logger.info("draining")
        await super().shutdown(sockets)  # type: ignore[arg-type]


def _uvicorn_config(
    frontend: Frontend, options: argparse.Namespace, config: FrontendConfig, tls: TlsFiles | None
) -> uvicorn.Config:
    served_by = uvicorn.Config(
        frontend,
        host=options.host,
        port=options.port,
        loop="uvloop",
        http=functools.partial(Connection, config, IdleConnections(config.max_idle_connections, raise_descriptors())),  # type: ignore[arg-type]  # any factory will do
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=options.drain_timeout,
    )
    if tls is not None:
        served_by.load()
        served_by.ssl = tls.context
    return served_by


def _keys(path: str | None, recipe: Recipe, member: Member | None) -> tuple[ApiKeys | None, list[FollowedFiles]]:
    named = path or os.environ.get("BIREME_API_KEYS", "")
    if not named and not recipe.frontend.api_keys:
        return None, []
    file = Path(named) if named else Path(recipe.folder) / recipe.frontend.api_keys
    followed = FollowedFiles("api_keys", [file], lambda: read_keys(file), lambda entries: keys.replace(entries))
    keys = load_keys(file, member.share_of) if member else load_keys(file)
    return keys, [followed]


def _kept_folder(recipe: Recipe, named: str, name: str, member: Member | None) -> Path | None:
    """Return where something is kept: a folder by name outlives the launch. None: it goes with this process."""
    if named:
        return Path(recipe.folder) / Path(named).expanduser()
    if run_folder := os.environ.get("BIREME_RUN_DIR"):
        return Path(run_folder) / name
    return member.folder / name if member is not None else None


if __name__ == "__main__":
    sys.exit(main())
