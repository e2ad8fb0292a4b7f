"""KV between two hosts' GPUs without GPUDirect: NIXL through page-locked memory over loopback TCP, and break-even.

Two processes on one GPU, as on two hosts but for the cable: UCX has TCP alone (UCX_TLS). tools/check_fabric.py measures
the transfer of an 8B model's prompt, a plain socket and page-locked copies in the same run. The slower of socket and
copies is what these allow together, since they overlap. `direct` is the same with rows that UCX reads out of the GPU.

Then a prefill and a decode engine of a model with windows: how long decode computes prompts of some lengths itself, and
how long it waits for their KV. The length at which the two meet is compared with what check_fabric says from its own
transfers, without engines.

    python benchmarks/fabric_gpu.py
    python benchmarks/fabric_gpu.py --engine none      # the transfers alone
    python benchmarks/fabric_gpu.py --quick            # also without a GPU, to see that it runs

The table comes first, then one line of JSON, then the aims.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

from benchmarks.engine_gpu import SHAPES, write_config
from benchmarks.transfer import aim
from benchmarks.transfer_gpu import Engines
from bireme.kv.transfer.base import KvLayout
from tools import check_fabric
from tools.fabric.break_even import Curve, break_even
from tools.fabric.ends import Way, own_facts
from tools.fabric.layout import model_layout, plain_layout
from tools.fabric.link import FarHost

HOST = "127.0.0.1"
AIM_SHARE = 0.6  # of what socket and copies allow
AIM_OFF = 0.25  # of the measured break-even
BYTES_8B = 131072  # a token


def main() -> None:
    options = parse()
    os.environ.setdefault("UCX_TLS", "tcp,cuda_copy")  # before UCX is loaded, here and in the other processes
    os.environ["BIREME_KEY"] = secrets.token_hex(32)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder, Fabric(options) as fabric:
        figures |= shown(fabric.rates())
        if options.engine != "none":
            config = write_config(folder, options.engine).to_dict()
            checked = fabric.points(model_layout(config, options.engine), options.prompts, options.rounds)
            figures |= shown({f"check_fabric {count}, ms": ms for count, ms in checked.items()})
            figures |= shown(engine_times(Path(folder), options))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{name}, {os.cpu_count()} cores, torch {torch.__version__}"
    rounded = {name: round(figure, 3) for name, figure in figures.items()}
    print(json.dumps({"benchmark": "fabric_gpu", "machine": machine, "options": vars(options), "figures": rounded}))
    report(figures, options)


def shown(figures: dict[str, float]) -> dict[str, float]:
    for name, figure in figures.items():
        print(f"{name:40} {figure:10,.2f}", flush=True)
    return figures


def report(figures: dict[str, float], options: argparse.Namespace) -> None:
    bounds = [rate for name, rate in figures.items() if name.startswith(("socket", "copies"))]
    aim(
        "NIXL staged over loopback TCP as share of what pinned copies and the socket allow together",
        figures["staged, GB/s"] / min(bounds),
        AIM_SHARE,
    )
    if options.engine == "none":
        return
    curves = {
        what: Curve.of({count: figures[f"{what} {count}, ms"] for count in options.prompts})
        for what in ("check_fabric", "transfer", "alone")
    }
    told, measured = (break_even(curves[what], curves["alone"]) for what in ("check_fabric", "transfer"))
    print(f"break-even: check_fabric {told}, measured {measured} tokens")
    if told is None or measured is None:
        print(f"aim: check_fabric's break-even against measured one: {'ok' if told == measured else 'MISSED'}, none")
        return
    off = abs(told / measured - 1)
    word = "ok" if off <= AIM_OFF else "MISSED"
    print(f"aim: check_fabric's break-even against measured one {off:.1%} off, {AIM_OFF:.0%} asked for: {word}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of an 8B model, for the rate")
    parser.add_argument(
        "--engine", choices=(*SHAPES, "none"), default="gemma-3-12b", help="shape of the engines' model"
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens, of the engines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few tokens, tiny shape, one round")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.prompts, options.rounds = 256, [64, 128], 1
        options.engine = "none" if options.engine == "none" else "tiny"
    options.gpus, options.backend, options.shape = 1, "nixl", options.engine
    options.prompt = max(options.prompts)
    return options


class Fabric:
    """check_fabric's two ends, the listener in a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._key = options, bytes.fromhex(os.environ["BIREME_KEY"])

    def __enter__(self) -> Fabric:
        program = [sys.executable, check_fabric.__file__, "--listen", "--port", "0"]
        self._listener = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        assert self._listener.stdout is not None
        self._port = int(self._listener.stdout.readline().rpartition(" ")[2])
        self._far = FarHost(HOST, self._port, self._key)
        return self

    def __exit__(self, *_: object) -> None:
        self._far.close()
        self._listener.terminate()
        self._listener.wait(30)

    def rates(self) -> dict[str, float]:
        """Return GB/s of the socket, the copies, and the transfer of one long prompt."""
        port, token = self._far.ask("pieces")
        pieces = check_fabric.piece_rates(HOST, port, token, check_fabric.PIECES)
        found = {"socket, GB/s": max(rate for _, rate in pieces.values())}
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            facts = own_facts("")
            copies = check_fabric.measure_copies(self._far, facts, facts)
            found |= {f"copies {name}, GB/s": rate for name, rate in copies.items()}
        layout, count = plain_layout(BYTES_8B), self._options.tokens
        ms = self.points(layout, [count], self._options.rounds)[count]
        found |= {"staged, ms": ms, "staged, GB/s": count * BYTES_8B / 1e6 / ms}
        if has_gpu:
            few = count // 8
            ms = self.points(layout, [few], 1, Way("NIXL", "never"))[few]
            found["direct, GB/s"] = few * BYTES_8B / 1e6 / ms
        return found

    def points(
        self, layout: KvLayout, prompts: list[int], rounds: int, way: Way = check_fabric.STAGED
    ) -> dict[int, float]:
        """Return milliseconds for each length."""
        options = argparse.Namespace(tokens=prompts, rounds=rounds)
        by, points = check_fabric.transfer_points(self._far, way, layout, options, self._key)
        assert by == "TCP" or "tcp" not in os.environ["UCX_TLS"], f"rows came by {by}"
        return points


def engine_times(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds until decode has a prompt computed by itself, and those that it waits for one's KV."""
    engines, found = Engines(folder, options), {}
    for count in options.prompts:
        options.prompt = count
        rounds: list[dict[str, Any]] = [engines.round() for _ in range(options.rounds + 1)][1:]
        for name in ("alone", "transfer"):
            found[f"{name} {count}, ms"] = float(np.median([one[name] for one in rounds]))
    engines.close()
    return found


if __name__ == "__main__":
    main()
