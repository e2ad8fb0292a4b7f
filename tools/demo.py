"""Serve the small sample model, prefill and decode apart, and stream one completion to the terminal.

    python tools/demo.py
    python tools/demo.py --prompt "What is 17 + 25?"
    python tools/demo.py --recipe recipes/tiny-agg

Text goes to stdout, everything else to stderr. The prompt is sent as a user's message, through the model's chat
template. The sample model, tiny-chat, knows a very small world: see models/tiny-chat/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bireme.errors import BiremeError, from_message
from bireme.launch import free_ports
from bireme.launch.canaries import CanarySettings
from bireme.launch.console import Console
from bireme.launch.deployment import Deployment, DeploymentSettings
from bireme.recipe_files import load_recipe
from bireme.types import Array, Tensors
from bireme.workers.grpc import GrpcChannel, infer_request, leave, outputs_of, rpc_error

_TIMEOUT_S = 120.0  # without any response
_LEAVE_S = 1.0  # from a request's end to its stream's


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
            figures = asyncio.run(show(deployment.server.grpc, options.prompt, options.max_tokens))
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


async def show(address: str, prompt: str, max_tokens: int) -> Figures:
    """Print the completion as it comes; return how fast it came."""
    print(f"\n> {prompt}\n", file=sys.stderr, flush=True)
    began = time.monotonic()
    pieces = []
    async for piece in stream(address, prompt, max_tokens):
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


async def stream(address: str, prompt: str, max_tokens: int) -> AsyncIterator[Piece]:
    """Yield a completion of `generate` piece by piece. Raises the error that the server sends."""
    channel = GrpcChannel(address)
    try:
        ids = (await channel.infer("tokenizer", {"messages": message(prompt)}))["input_ids"]
        call = channel.stream()
        await call.write(infer_request("generate", request_inputs(ids, max_tokens)))
        await call.done_writing()
        while (response := await _next(call)) is not None:
            if response.error_message:
                await leave(call, _LEAVE_S)
                raise from_message(response.error_message)
            if piece := _piece(outputs_of(response.infer_response)):
                yield piece
    except grpc.aio.AioRpcError as error:
        raise rpc_error(error, address) from error
    finally:
        await channel.close()


def message(prompt: str) -> bytes:
    """Return the tokenizer's input: one message of a user."""
    return json.dumps([{"role": "user", "content": prompt}]).encode()


def request_inputs(ids: Array, max_tokens: int) -> dict[str, Array]:
    return {"input_ids": ids, "max_tokens": np.array([max_tokens], np.int32), "stream": np.array([True])}


async def _next(call: Any) -> Any:
    """Return one response; None at the stream's end."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            response = await call.read()
    except TimeoutError:
        raise BiremeError(f"no response within {_TIMEOUT_S:.0f} s") from None
    return None if response is grpc.aio.EOF else response


def _piece(outputs: Tensors) -> Piece | None:
    if "text_output" not in outputs:
        return None
    text, ids = bytes(outputs["text_output"][0]), outputs.get("output_ids")
    return Piece(text.decode(errors="replace"), 0 if ids is None else ids.size, time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
