"""Serve a recipe: start tritonserver, load the models, heal what dies, tell the health, stop in order.

    python tools/serve.py recipes/tiny
    python tools/serve.py --model models/tiny-llama --disaggregated
    python tools/serve.py --model SmolLM2-135M-Instruct.Q4_1.gguf
    python tools/serve.py recipes/tiny --override '{"workers": {"decode": {"replicas": 2}}}' --http-port 8100
    python tools/serve.py recipes/tiny --set workers.decode.replicas=2
    python tools/serve.py recipes/tiny --host 0.0.0.0                                    # OpenAI's API for the network
    python tools/serve.py recipes/tiny --discovery etcd://host:2379 --grpc-host 10.1.0.0/16  # one of several servers

--model chooses dtype, context and KV pool that fit this machine, and says which; --set has the last word.
Prints the endpoints when ready; OpenAI's API is on --openai-port. SIGTERM, SIGHUP or Ctrl-C lets requests under way
end, then stops; a second one stops at once. GET /health/live and /health/ready on --health-port are for probes
and load balancers.

Exit codes: 0 stopped as asked; 1 a model or the server did not start, or the server kept dying;
2 an option, the recipe or something that the launch needs is wrong or missing; 3 stopped by a second signal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.config import DEFAULT_RECIPE, Recipe
from bireme.discovery.records import MAX_GENERATION, LaunchFacts, check_weight
from bireme.discovery.store import parse_address, with_discovery
from bireme.engine_kinds import ENGINE_KINDS
from bireme.errors import BiremeError, ConfigError
from bireme.launch.admin_door import AdminSettings
from bireme.launch.canaries import CanarySettings
from bireme.launch.config_dump import OPTION, ConfigFile, Given, State, describe
from bireme.launch.console import LEVELS, Console
from bireme.launch.deployment import Deployment, DeploymentSettings, advertised_address
from bireme.launch.footprint.choice import choose
from bireme.launch.footprint.machine_memory import read_machine
from bireme.launch.frontend import FrontendSettings, check_frontend
from bireme.launch.openings import check_openings
from bireme.launch.override import add_settings, parse_setting
from bireme.launch.ports import LOOPBACK, Hosts, Ports, host_in
from bireme.launch.quick_recipe import write_recipe
from bireme.launch.run_folder import RunFolder
from bireme.launch.tritonserver import address
from bireme.launch.value_sources import Layer
from bireme.observability.otlp import DEFAULT_ENDPOINT
from bireme.recipe_files import load_recipe
from bireme.stop_signals import on_stop_signal

STOPPED, FAILED, WRONG, FORCED = 0, 1, 2, 3
_FROM_ENVIRONMENT = {"recipe": "BIREME_RECIPE", "override": "BIREME_OVERRIDE", "openai_port": "BIREME_OPENAI_PORT"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(options.log_level, options.json_logs)
    try:
        return launch(options, console)
    finally:
        console.flush()


def launch(options: argparse.Namespace, console: Console) -> int:
    """Make the deployment and serve it; return the exit code."""
    run_folder = None
    try:
        config_file = ConfigFile(options.dump_config_to) if options.dump_config_to else None
        run_folder = RunFolder()
        if options.openai_port:
            check_frontend()
        settings = settings_of(options, run_folder, lambda says: console.event("model_fits", says=says))
        deployment = Deployment(settings, console, run_folder)
    except ConfigError as error:
        if run_folder is not None:
            run_folder.remove()
        return report(console, error, WRONG)

    if options.check:
        return check(deployment, console, options.api_keys)

    def dump_config(state: State) -> None:
        if config_file is not None:
            try:
                config_file.write(describe(deployment, given_by(options), state))
            except OSError as error:
                console.event("config_not_dumped", "warning", path=options.dump_config_to, reason=error)

    return serve(deployment, console, dump_config)


def check(deployment: Deployment, console: Console, api_keys: str | None = None) -> int:
    """Say what recipe, options, keys or this machine lack, and start nothing; return the exit code."""
    try:
        deployment.check()
        if api_keys:
            from bireme.openai.keys import read_keys

            read_keys(Path(api_keys))
    except ConfigError as error:
        return report(console, error, WRONG)
    finally:
        deployment.run_folder.remove()
    console.event("checked", recipe=deployment.settings.recipe.name)
    return STOPPED


def serve(deployment: Deployment, console: Console, dump_config: Callable[[State], None] = lambda state: None) -> int:
    """Run a deployment until a signal ends it; return the exit code."""
    signals: list[int] = []
    with stopped_by_signals(deployment, console, signals):
        try:
            dump_config("starting")
            with deployment:
                if not deployment.is_stopping:
                    dump_config("ready")
                code = STOPPED if deployment.supervise() else FAILED
        except ConfigError as error:
            code = report(console, error, WRONG)
        except BiremeError as error:
            code = report(console, error, FAILED)
        return FORCED if len(signals) > 1 else code  # what the second one killed can be over here before it is there


def frontend_of(
    options: argparse.Namespace, recipe: str, override: str, run_folder: RunFolder, hosts: Hosts, advertised: str
) -> FrontendSettings | None:
    if not options.openai_port:
        return None
    if bool(options.tls_cert) != bool(options.tls_key):
        raise ConfigError("--tls-cert and --tls-key belong together; give both, or none")
    arguments = ["--log-level", options.log_level, "--processes", str(options.frontend_processes)]
    if options.api_keys:
        arguments += ["--api-keys", options.api_keys]
    return FrontendSettings(
        recipe=recipe,
        grpc=address(hosts.grpc, options.grpc_port),
        host=host_in(options.host),
        port=options.openai_port,
        drain_timeout_s=options.drain_timeout,
        tls=(options.tls_cert, options.tls_key) if options.tls_cert else None,
        arguments=tuple(arguments),
        environment={
            "BIREME_OVERRIDE": override,
            "BIREME_GRPC": address(hosts.grpc, options.grpc_port),
            "BIREME_ADVERTISE": advertised,
            "BIREME_RUN_DIR": str(run_folder.path),
        },
        shm_prefix=run_folder.shm_prefix,
    )


def launch_facts(options: argparse.Namespace) -> LaunchFacts:
    """Raises ConfigError."""
    if not 0 <= options.generation <= MAX_GENERATION:
        raise ConfigError(f"--generation: {options.generation}; 0 to {MAX_GENERATION}, a newer one is higher")
    try:
        return LaunchFacts(generation=options.generation, weight=check_weight(options.weight))
    except ValueError as error:
        raise ConfigError(f"--weight: {error}") from error


def admin_of(options: argparse.Namespace) -> AdminSettings | None:
    """Raises ConfigError."""
    if options.admin_port is None:
        return None
    settings = AdminSettings(
        port=options.admin_port,
        host=host_in(options.admin_host),
        key_file=options.admin_key_file,
        certificate=options.admin_tls_cert,
        certificate_key=options.admin_tls_key,
        client_authority=options.admin_client_ca,
    )
    settings.check()
    return settings


def report(console: Console, error: BiremeError, code: int) -> int:
    for line in str(error).splitlines():
        console.event(line, "error")
    return code


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_options(parser)
    add_network_options(parser)
    parser.add_argument("--drain-timeout", type=int, default=30, metavar="S", help="seconds for requests at the end")
    parser.add_argument(
        "--canary-interval",
        type=float,
        default=CanarySettings().interval_s,
        metavar="S",
        help="0: no canary generations",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument("--json-logs", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--check", action="store_true", help="say what recipe, options or this machine lack, and start nothing"
    )
    parser.add_argument("--triton-arg", action="append", default=[], metavar="FLAG", help="one more flag; may repeat")
    parser.add_argument(
        OPTION, metavar="FILE", help="write all that is effective, and what set it, into this file: .json, .yaml, .yml"
    )
    options = parser.parse_args(arguments)
    options.named = named_options(parser, options, arguments)
    if options.recipe and options.model:
        parser.error("give a recipe or --model, not both")
    if options.disaggregated and not options.model:
        parser.error("--disaggregated belongs to --model; a recipe says itself what it serves")
    return options


def named_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, arguments: Sequence[str] | None
) -> frozenset[str]:
    """Return the options that the command line names."""
    unnamed = argparse.Namespace(**{name: [] for name in vars(options)})  # argparse sets defaults where nothing is
    found = vars(parser.parse_args(arguments, unnamed))
    return frozenset(name for name, value in found.items() if value not in ([], None))


def given_by(options: argparse.Namespace) -> Given:
    """Return what set each option, and what is merged over the recipe. It has been read without an error."""

    def source_of(name: str) -> str:
        if name in options.named:
            return f"--{name.replace('_', '-')}" if name != "recipe" else "command line"
        variable = _FROM_ENVIRONMENT.get(name, "")
        return variable if os.environ.get(variable) else "default"

    layers = [Layer(source_of("override"), json.loads(options.override or "{}"))]
    layers += [Layer("--set", parse_setting(setting)) for setting in options.set]
    if options.discovery:  # it replaces the block
        layers = [Layer(layer.name, {**layer.tree, "discovery": {}}) for layer in layers]
        layers.append(Layer("--discovery", {"discovery": parse_address(options.discovery)}))
    shown: dict[str, Any] = {
        name: {"value": value, "source": source_of(name)}
        for name, value in vars(options).items()
        if name not in ("named", "override", "set", "triton_arg")
    }
    return Given(options=shown, layers=layers, base="--model" if options.model else "")


def add_recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="folder with recipe.yaml; default BIREME_RECIPE, else recipes/tiny")
    parser.add_argument(
        "--model", metavar="MODEL",
        help="folder, GGUF file or hub id: serve this model without a recipe",
    )  # fmt: skip
    parser.add_argument("--disaggregated", action="store_true", help="with --model: prefill and decode apart")
    parser.add_argument("--engine", choices=tuple(ENGINE_KINDS), default="torch", help="with --model")
    parser.add_argument(
        "--override", default=os.environ.get("BIREME_OVERRIDE", ""), metavar="JSON", help="over the recipe"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting over the recipe; may repeat"
    )


def add_network_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default=LOOPBACK, metavar="ADDRESS",
        help="where OpenAI's API listens, an address of this machine, or its network (10.1.0.0/16) as for all options"
        " of hosts; 0.0.0.0 opens it to every network",
    )  # fmt: skip
    parser.add_argument(
        "--triton-host", default=LOOPBACK, metavar="ADDRESS",
        help="where Triton's HTTP, gRPC and metrics listen, which ask for no key",
    )  # fmt: skip
    parser.add_argument("--grpc-host", metavar="ADDRESS", help="Triton's gRPC alone, for other servers and frontends")
    parser.add_argument("--metrics-host", metavar="ADDRESS", help="Triton's metrics alone, for Prometheus")
    parser.add_argument(
        "--health-host", default=LOOPBACK, metavar="ADDRESS", help="/health/live, /health/ready, a gateway's /metrics"
    )
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002), ("health", 8003)):
        parser.add_argument(f"--{name}-port", type=int, default=port, metavar="PORT")
    parser.add_argument(
        "--openai-port", type=int, default=os.environ.get("BIREME_OPENAI_PORT", "9000"), metavar="PORT",
        help="OpenAI's API; 0: without",
    )  # fmt: skip
    parser.add_argument(
        "--allow-client-shm", action="store_true",
        help="let KServe clients on this machine pass tensors in shared memory: for trusted clients only",
    )  # fmt: skip
    parser.add_argument(
        "--visible-keys", action="store_true",
        help="start even where ptrace is forbidden, so that all users of this host can read Triton's keys",
    )  # fmt: skip
    parser.add_argument(
        "--discovery", metavar="ADDRESS",
        help="where servers of one model find each other: a folder that all see, etcd://host:2379[,host2:2379], or in"
        " Kubernetes kubernetes://SERVICE[.NAMESPACE]",
    )  # fmt: skip
    parser.add_argument(
        "--advertise", default="", metavar="HOST[:PORT]",
        help="by which other servers reach this one's gRPC port; default: --grpc-host, or this host's name for 0.0.0.0",
    )  # fmt: skip
    parser.add_argument(
        "--generation", type=int, default=0, metavar="N",
        help="of those that serve side by side; the newest has the highest number (docs/operations.md)",
    )  # fmt: skip
    parser.add_argument(
        "--weight", type=float, default=1.0, metavar="SHARE",
        help="0 to 1: of new requests, the share that its generation gets until the admin door is told another",
    )  # fmt: skip
    parser.add_argument("--api-keys", metavar="FILE", help="keys that the OpenAI frontend asks for")
    parser.add_argument(
        "--triton-without-keys", action="store_true",
        help="open Triton's ports, which ask for no key, although the OpenAI frontend does",
    )  # fmt: skip
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="certificate chain of the OpenAI frontend, which then speaks https"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its key")
    parser.add_argument("--admin-port", type=int, metavar="PORT", help="drain, sleep, status over HTTP; default: no")
    parser.add_argument("--admin-host", default=LOOPBACK, metavar="ADDRESS", help="where the admin door listens")
    parser.add_argument("--admin-key-file", default="", metavar="FILE", help="with the key that the door asks for")
    parser.add_argument("--admin-tls-cert", default="", metavar="FILE", help="of the door, which then speaks https")
    parser.add_argument("--admin-tls-key", default="", metavar="FILE", help="its key")
    parser.add_argument("--admin-client-ca", default="", metavar="FILE", help="whose client certificates it asks for")
    parser.add_argument(
        "--enable-otel", action="store_true",
        help="send traces, as OTEL_EXPORT_ENABLED=1 does: to OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or the recipe's"
        f" observability.traces.endpoint, else to {DEFAULT_ENDPOINT}",
    )  # fmt: skip
    parser.add_argument("--frontend-processes", type=int, default=1, metavar="N", help="that share the OpenAI port")


def hosts_of(options: argparse.Namespace) -> Hosts:
    """Return where tritonserver listens. Raises ConfigError."""
    everywhere = options.triton_host
    named = (everywhere, options.grpc_host or everywhere, options.metrics_host or everywhere)
    return Hosts(*map(host_in, named))


def recipe_of(options: argparse.Namespace, run_folder: RunFolder, override: str, say: Callable[[str], None]) -> Recipe:
    """Return the recipe to serve; of --model with what fits this machine, which is said. Raises ConfigError."""
    if not options.model:
        return load_recipe(options.recipe or os.environ.get("BIREME_RECIPE") or DEFAULT_RECIPE, override)
    folder = run_folder.path / "recipe"
    layout: dict[str, Any] = {"disaggregated": options.disaggregated, "engine": options.engine}
    recipe = load_recipe(write_recipe(folder, options.model, **layout), override)
    if (fitting := choose(recipe, read_machine())) is None:
        return recipe
    say(fitting.says)
    return load_recipe(write_recipe(folder, options.model, **layout, chosen=fitting.config), override)


def settings_of(
    options: argparse.Namespace, run_folder: RunFolder, say: Callable[[str], None] = lambda says: None
) -> DeploymentSettings:
    override = with_discovery(add_settings(options.override, options.set), options.discovery)
    recipe = recipe_of(options, run_folder, override, say)
    if options.enable_otel:
        os.environ["OTEL_EXPORT_ENABLED"] = "1"  # of everything that is started
    hosts = hosts_of(options)
    has_keys = bool(options.api_keys or os.environ.get("BIREME_API_KEYS") or recipe.frontend.api_keys)
    check_openings(
        hosts,
        recipe,
        has_keys=has_keys and not options.triton_without_keys,
        advertise=options.advertise,
        health_host=host_in(options.health_host),
    )
    advertised = advertised_address(options.advertise or hosts.grpc, options.grpc_port)
    return DeploymentSettings(
        recipe=recipe,
        override=override,
        hosts=hosts,
        ports=Ports(options.http_port, options.grpc_port, options.metrics_port),
        health_host=host_in(options.health_host),
        health_port=options.health_port,
        drain_timeout_s=options.drain_timeout,
        admin=admin_of(options),
        canaries=CanarySettings(interval_s=options.canary_interval),
        frontend=frontend_of(options, recipe.folder, override, run_folder, hosts, advertised),
        facts=launch_facts(options),
        advertise=advertised,
        allow_client_shm=options.allow_client_shm,
        visible_keys=options.visible_keys,
        triton_arguments=tuple(options.triton_arg),
        environment={"BIREME_LOG_LEVEL": options.log_level},
    )


def stopped_by_signals(
    deployment: Deployment, console: Console, seen: list[int]
) -> contextlib.AbstractContextManager[object]:
    """The first SIGTERM, SIGINT or SIGHUP asks for an orderly stop, the second ends everything at once.

    Their numbers are added to `seen`.
    """

    def tell(number: int) -> None:
        seen.append(number)
        deployment.request_stop()
        if len(seen) == 2:
            deployment.kill()
            deployment.run_folder.remove()
            console.flush(0.5)
            os._exit(FORCED)

    return on_stop_signal(tell)


if __name__ == "__main__":
    sys.exit(main())
