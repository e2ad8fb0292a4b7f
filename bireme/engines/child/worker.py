"""The engine process: `python -m bireme.engines.child.worker --worker decode --endpoint ipc:///run/x ...`.

Recipe and override come from the environment as load_recipe reads them (a supervisor hands its own
recipe over instead, see environment.py), the run directory from BIREME_RUN_DIR. By hand, leave --parent out.

Its one rule: nothing heavy is imported before the process is tied to its parent. A death signal that is set
after slow imports misses a parent that has died meanwhile, and leaves an orphan with a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.parent:
        die_with_parent(options.parent)
    if options.worker.startswith("video_diffusion"):
        from bireme.engines.video.process import VideoProcess

        return VideoProcess(options.worker, options.endpoint, options.life).run()
    from bireme.engines.child.process import EngineProcess

    return EngineProcess(options.worker, options.endpoint, options.life).run()


def die_with_parent(parent: int) -> None:
    """Get SIGKILL when the thread that started this process ends; exit now if its process is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"parent {parent} has died before the engine process started")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bireme.engines.child.worker", description="Runs one worker's engine.")
    parser.add_argument("--worker", required=True, help="the Triton model's name: decode, decode_1, prefill, ...")
    parser.add_argument("--endpoint", required=True, help="prefix of the two sockets, e.g. ipc:///tmp/engine")
    parser.add_argument("--life", type=int, default=1, help="number of this life, unique within the worker")
    parser.add_argument("--parent", type=int, default=0, help="process id to live and die with; 0: none")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    status = main()
    gc.unfreeze()  # what a process has frozen for good, libraries would report as leaked
    sys.exit(status)
