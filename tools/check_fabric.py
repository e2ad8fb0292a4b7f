"""Measure what moves KV between two hosts, at which rate, and from which prompt length disaggregation pays there.

    BIREME_KEY=... python tools/check_fabric.py --listen                            # on the host that shall prefill
    BIREME_KEY=... python tools/check_fabric.py gpu-1 --recipe recipes/qwen3-disagg      # on the one that shall decode
    python tools/check_fabric.py gpu-1 --prefill-ms 128:8.3,2048:49,8192:250 --json
    python tools/check_fabric.py gpu-1 --kv-bytes-per-token 131072 --tokens 512 4096 --prefill-ms-per-token 0.026

Both need the deployment's key (BIREME_KEY) and the same bireme. Rows go as engines' do: from the listener's GPU to this
host's, or between their host memories where one has no GPU. Beside them stand a plain socket and page-locked copies,
which bound what the staged way can reach. Prefill's time is what is named, else router.prefill_ms_per_token.

Break-even is the prompt length from which on moving a prompt's KV takes less time than computing it would. The last
lines are the router's settings for it. Where a way can't be measured the table says why.

Exit codes: 0; 1 a way that engines would take could not be measured; 2 the listener can't be reached, has another key
or another version, or an option is wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec

import bireme
from benchmarks.options import positive_count
from bireme.disagg import DisaggregatedParams
from bireme.discovery.records import WorkerRecord
from bireme.discovery.run_folder import named_key
from bireme.errors import BiremeError, ConfigError
from bireme.kv.transfer.base import KvLayout
from bireme.recipe_files import load_recipe
from tools.fabric.break_even import Curve, break_even
from tools.fabric.ends import ExportEnd, HostFacts, ImportEnd, Traffic, Way, check_versions, copy_rates, own_facts
from tools.fabric.layout import moved_bytes, plain_layout, recipe_layout
from tools.fabric.link import PORT, FarHost, Listener, PieceServer, piece_rates

GOOD, PARTLY, WRONG = 0, 1, 2
PIECES = {4 << 10: 4096, 64 << 10: 2048, 1 << 20: 256, 16 << 20: 32}  # bytes: how many for the rate
TOKENS = (128, 512, 2048, 8192)
STAGED = Way("NIXL", "always")
_SLOW_S = 5.0  # a transfer that takes longer is the last of its way
_DEFAULT_BYTES = 131072  # a token: an 8B model's in bfloat16
_DEFAULT_PREFILL_MS = 0.03


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        key = named_key()
        if key is None:
            raise ConfigError(
                "BIREME_KEY: not set; give both hosts the deployment's (`openssl rand -hex 32` makes one)"
            )
        if options.listen:
            return listen(options.port, key)
        found = measure(options, key)
    except BiremeError as error:
        print(error, file=sys.stderr)
        return WRONG
    report(found)
    if options.json:
        print(json.dumps(found))
    return PARTLY if any(way["error"] for way in found["ways"]) else GOOD


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", nargs="?", metavar="HOST", help="where the listener runs")
    parser.add_argument("--listen", action="store_true", help="be the listener, until SIGINT or SIGTERM")
    parser.add_argument("--port", type=int, default=PORT, help="of the listener (%(default)s); 0: a free one")
    parser.add_argument("--recipe", help="folder: its model's KV bytes, and prefill's time")
    parser.add_argument("--kv-bytes-per-token", type=positive_count, help="in place of a recipe's")
    parser.add_argument("--tokens", type=positive_count, nargs="+", default=TOKENS, help="prompt lengths to move")
    parser.add_argument("--rounds", type=positive_count, default=5, help="of each; the median counts")
    parser.add_argument("--prefill-ms-per-token", type=float, help="of decode's engine")
    parser.add_argument("--prefill-ms", type=curve, metavar="N:MS,...", help="of prompts of N tokens, measured")
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    options = parser.parse_args(arguments)
    if options.listen == bool(options.host):
        parser.error("name the listener's HOST, or --listen")
    return options


def curve(text: str) -> Curve:
    try:
        points = {int(count): float(ms) for count, ms in (point.split(":") for point in text.split(","))}
    except ValueError:
        points = {}
    if len(points) < 2:
        raise argparse.ArgumentTypeError(f"{text}: two points or more, such as 128:8.3,2048:49")
    return Curve.of(points)


# The listener


def listen(port: int, key: bytes) -> int:
    exports = Exports()
    listener = Listener(port, key, exports.handlers())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: listener.close())
    print(f"listening on port {listener.port}; ask with tools/check_fabric.py HOST --port {listener.port}", flush=True)
    try:
        listener.serve()
    finally:
        exports.close()
    return GOOD


class Exports:
    """What the listener does when it is asked."""

    def __init__(self) -> None:
        self._end: ExportEnd | None = None
        self._facts = own_facts(bireme.__version__)  # imports torch, which takes long

    def handlers(self) -> dict[str, Any]:
        return {
            "hello": self.hello, "copies": copy_rates, "pieces": self.pieces, "open": self.open, "export": self.export,
            "close": self.close,
        }  # fmt: skip

    def hello(self) -> Any:
        self.close()  # of a peer that is gone
        return msgspec.to_builtins(self._facts)

    def pieces(self) -> Any:
        server = PieceServer()
        return [server.port, server.token]

    def open(self, way: dict[str, str], layout: Any, num_tokens: int, host: str, deployment_key: bytes) -> Any:
        self.close()
        self._end = ExportEnd(
            "prefill", Way(**way), msgspec.convert(layout, KvLayout), num_tokens, host=host,
            deployment_key=deployment_key,
        )  # fmt: skip
        return msgspec.to_builtins(self._end.record)

    def export(self, num_tokens: int) -> Any:
        if self._end is None:
            raise ConfigError("another peer has asked this listener meanwhile; ask again")
        return msgspec.to_builtins(self._end.export(num_tokens))

    def close(self) -> None:
        if self._end is not None:
            self._end.close()
        self._end = None


# Who asks


def measure(options: argparse.Namespace, key: bytes) -> dict[str, Any]:
    """Return all that was measured, and what follows. Raises ConfigError."""
    recipe = load_recipe(options.recipe) if options.recipe else None
    if options.kv_bytes_per_token or recipe is None:
        layout = plain_layout(options.kv_bytes_per_token or _DEFAULT_BYTES)
    else:
        layout = recipe_layout(recipe)
    per_token = options.prefill_ms_per_token or (recipe.router.prefill_ms_per_token if recipe else _DEFAULT_PREFILL_MS)
    prefill = options.prefill_ms or Curve.line(per_token)
    far = FarHost(options.host, options.port, key)
    try:
        theirs, ours = msgspec.convert(far.ask("hello"), HostFacts), own_facts(bireme.__version__)
        check_versions(ours, theirs)
        port, token = far.ask("pieces")
        return {
            "there": msgspec.to_builtins(theirs),
            "here": msgspec.to_builtins(ours),
            "kv_bytes_per_token": layout.bytes_per_token,
            "socket": {
                size: {"ms": ms, "GB/s": rate}
                for size, (ms, rate) in piece_rates(options.host, port, token, PIECES).items()
            },
            "copies": measure_copies(far, theirs, ours),
            "ways": [
                measure_way(far, way, layout, options, prefill, key) for way in ways_between(theirs, ours)
            ],
        }  # fmt: skip
    finally:
        far.close()


def measure_copies(far: FarHost, theirs: HostFacts, ours: HostFacts) -> dict[str, float]:
    """Return GB/s of page-locked copies, of the side that needs them."""
    found = {}
    if theirs.gpu:
        found["from the GPU there"] = far.ask("copies")[0]
    if ours.gpu:
        found["to the GPU here"] = copy_rates()[1]
    return found


def ways_between(theirs: HostFacts, ours: HostFacts) -> list[Way]:
    """Return the ways to measure; the first is what engines take by themselves between hosts."""
    if not (theirs.gpu and ours.gpu):
        return [Way("NIXL")]
    ways = [STAGED]
    if not theirs.why_not_direct:
        ways.insert(0, Way("NIXL", "never"))
    if theirs.host == ours.host:
        ways.append(Way("CUDA_IPC"))
    return ways


def measure_way(
    far: FarHost, way: Way, layout: KvLayout, options: argparse.Namespace, prefill: Curve, key: bytes
) -> dict[str, Any]:
    """Return its rates, break-even and the router's settings; `error`: why it could not be measured."""
    found: dict[str, Any] = {"way": way.name, "by": "", "error": "", "tokens": {}}
    try:
        found["by"], points = transfer_points(far, way, layout, options, key)
    except BiremeError as error:
        return found | {"error": str(error)}
    transfer = Curve.of(points)
    start, slope = transfer.fit()
    return found | {
        "tokens": {
            count: {"ms": ms, "GB/s": moved_bytes(layout, count) / 1e6 / ms} for count, ms in points.items()
        },
        "break_even_tokens": break_even(transfer, prefill),
        "measured_to": max(points),
        "router": {
            "transfer_ms": round(start, 2), "transfer_ms_per_token": round(slope, 5),
            "prefill_ms_per_token": round(prefill.fit()[1], 5),
        },
    }  # fmt: skip


def transfer_points(
    far: FarHost, way: Way, layout: KvLayout, options: argparse.Namespace, key: bytes
) -> tuple[str, dict[int, float]]:
    """Return by what rows came, and milliseconds for each length. Raises BiremeError."""
    longest = max(options.tokens)
    told = {"backend": way.backend, "staging": way.staging}
    arguments = {"layout": msgspec.to_builtins(layout), "num_tokens": longest, "host": far.host, "deployment_key": key}
    record = msgspec.convert(far.ask("open", way=told, **arguments), WorkerRecord)
    end = ImportEnd("decode", way, layout, longest, find=lambda _: record, host=far.host, deployment_key=key)
    try:
        points: dict[int, float] = {}
        for count in sorted(options.tokens):
            traffic = Traffic()
            seconds = [_fetch(far, end, count) for _ in range(options.rounds + 1)][1:]  # the first makes connections
            points[count] = 1e3 * median(seconds)
            by = traffic.way((options.rounds + 1) * moved_bytes(layout, count))
            if median(seconds) > _SLOW_S:
                break
        return by, points
    finally:
        end.close()
        far.ask("close")


def _fetch(far: FarHost, end: ImportEnd, num_tokens: int) -> float:
    return end.fetch_seconds(msgspec.convert(far.ask("export", num_tokens=num_tokens), DisaggregatedParams))


# What is told


def report(found: Mapping[str, Any]) -> None:
    for side in ("there", "here"):
        facts = found[side]
        print(f"{side:6} {facts['gpu'] or 'no GPU'}, {facts['nixl'] or 'no NIXL'}, bireme {facts['bireme']}")
    row = "{:38} {:>12} {:>10} {:>8}".format
    print(row("", "size", "ms", "GB/s"))
    for size, figures in found["socket"].items():
        print(row("socket", amount(size), f"{figures['ms']:.2f}", f"{figures['GB/s']:.2f}"))
    for name, rate in found["copies"].items():
        print(row(f"copies {name}", "16 MiB", "", f"{rate:.1f}"))
    for way in found["ways"]:
        report_way(way, row)


def report_way(way: Mapping[str, Any], row: Any) -> None:
    name = NAMES.get(way["way"], way["way"])
    if way["error"]:
        print(f"{name}: not measured: {way['error']}")
        return
    for count, figures in way["tokens"].items():
        print(row(f"{name}, by {way['by']}", f"{count} tokens", f"{figures['ms']:.2f}", f"{figures['GB/s']:.2f}"))
    length, longest = way["break_even_tokens"], way["measured_to"]
    if length is None:
        print("  break-even: none; computing a prompt is quicker than moving its KV, whatever its length")
    else:
        beyond = f", beyond the {longest} measured" if length > longest else ""
        print(f"  break-even: disaggregation pays from prompts of {length} tokens on{beyond}")
    print("  router: " + ", ".join(f"{key}: {value}" for key, value in way["router"].items()))


NAMES = {
    "NIXL always": "NIXL, staged", "NIXL never": "NIXL, GPUDirect", "NIXL auto": "NIXL, host memory",
    "CUDA_IPC auto": "CUDA_IPC",
}  # fmt: skip


def amount(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


if __name__ == "__main__":
    sys.exit(main())
