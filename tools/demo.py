"""Serve the small sample model, prefill and decode apart, and stream one completion to the terminal.

    python tools/demo.py
    python tools/demo.py --prompt "What is 17 + 25?"
    python tools/demo.py --recipe recipes/tiny-agg

Text goes to stdout, everything else to stderr. The prompt is sent as a user's message, through the model's chat
template. The sample model, tiny-chat, knows a very small world: see models/tiny-chat/README.md.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.errors import BiremeError, from_message
from bireme.launch import free_ports
from bireme.launch.canaries import CanarySettings
from bireme.launch.console import Console
from bireme.launch.deployment import Deployment, DeploymentSettings
from bireme.recipe_files import load_recipe

_TIMEOUT_S = 120.0  # without any response


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    num_tokens: int
    at: float  # time.monotonic()


@dataclass(frozen=True, slots=True)
class Figures:
    num_tokens: int
    ttft_ms: float
    tokens_per_s: float  # after the first token


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(models_level="info" if options.verbose else "warning")
    try:
        settings = DeploymentSettings(
            recipe=load_recipe(options.recipe, ""),
            ports=free_ports(),
            health_port=0,
            canaries=CanarySettings(interval_s=0),
        )
        with Deployment(settings, console) as deployment:
            figures = show(deployment.server.grpc, options.prompt, options.max_tokens)
    except BiremeError as error:
        console.event(str(error), "error")
        return 1
    except KeyboardInterrupt:
        return 130
    say(figures)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/tiny")
    parser.add_argument("--prompt", default="Continue the story: Once upon a time, Rosa lost a red kite in the forest.")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--verbose", action="store_true", help="show the lines of models and engines as well")
    return parser.parse_args(arguments)


def show(grpc: str, prompt: str, max_tokens: int) -> Figures:
    """Print the completion as it comes; return how fast it came."""
    print(f"\n> {prompt}\n", file=sys.stderr, flush=True)
    began = time.monotonic()
    pieces = []
    for piece in stream(grpc, prompt, max_tokens):
        pieces.append(piece)
        print(piece.text, end="", flush=True)
    print("\n", flush=True)
    return figures_of(pieces, began)


def figures_of(pieces: Sequence[Piece], began: float) -> Figures:
    """The first piece's tokens count for the time to the first token, those after it for the speed."""
    timed = [piece for piece in pieces if piece.num_tokens]
    if not timed:
        return Figures(0, 0.0, 0.0)
    later = sum(piece.num_tokens for piece in timed[1:])
    seconds = timed[-1].at - timed[0].at
    return Figures(
        num_tokens=later + timed[0].num_tokens,
        ttft_ms=(timed[0].at - began) * 1e3,
        tokens_per_s=later / seconds if seconds > 0 else 0.0,
    )


def say(figures: Figures) -> None:
    print(
        f"{figures.num_tokens} tokens, time to first token {figures.ttft_ms:.0f} ms, then"
        f" {figures.tokens_per_s:.0f} tokens/s"
    )


def stream(grpc: str, prompt: str, max_tokens: int) -> Iterator[Piece]:
    """Yield a completion of `generate` piece by piece. Raises the error that the server sends."""
    from tritonclient.grpc import InferenceServerClient

    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with InferenceServerClient(grpc) as client:
        ids = client.infer("tokenizer", [message(prompt)]).as_numpy("input_ids")
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer("generate", request_inputs(ids, max_tokens), enable_empty_final_response=True)
        is_over = False
        try:
            while not is_over:
                result, error = _next(answers)
                is_over = error is not None or result.get_response().parameters["triton_final_response"].bool_param
                if error is not None:
                    raise from_message(error.message())
                if piece := _piece(result):
                    yield piece
        finally:  # a cancel of what has ended can keep Triton from ending: docs/troubleshooting.md
            client.stop_stream(cancel_requests=not is_over)


def message(prompt: str) -> Any:
    """Return the tokenizer's input: one message of a user."""
    return _input("messages", "BYTES", np.array([json.dumps([{"role": "user", "content": prompt}])], object))


def request_inputs(ids: Any, max_tokens: int) -> list[Any]:
    return [
        _input("input_ids", "INT32", ids),
        _input("max_tokens", "INT32", np.array([max_tokens], np.int32)),
        _input("stream", "BOOL", np.array([True])),
    ]


def _input(name: str, kind: str, array: Any) -> Any:
    from tritonclient.grpc import InferInput

    tensor = InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _next(answers: queue.SimpleQueue[tuple[Any, Any]]) -> tuple[Any, Any]:
    try:
        return answers.get(timeout=_TIMEOUT_S)
    except queue.Empty:
        raise BiremeError(f"no response within {_TIMEOUT_S:.0f} s") from None


def _piece(result: Any) -> Piece | None:
    text, ids = result.as_numpy("text_output"), result.as_numpy("output_ids")
    if text is None:
        return None
    return Piece(text[0].decode(errors="replace"), 0 if ids is None else ids.size, time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
