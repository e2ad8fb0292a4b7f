"""bireme's own load, as a process of its own: streamed completions of random tokens, of exact lengths.

    python -m tools.sweeping.own_load --url http://127.0.0.1:9000 --model mocker --tokenizer models/tiny-llama \\
        --input-tokens 128 --output-tokens 64 --concurrency 4 --requests 40

Prompts are token ids, so that no template and no second reading of text changes a length, and none begins like another.
With --rate requests come at random times (a Poisson process), whether others have ended or not. The last line of stdout
is one JSON document: figures, the first errors, and the share of the time in which this process was busy. Close to 1 it
is the load that could not do more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec

from bireme.sizing.figures import Answered, of_requests

_NUM_ERRORS = 3  # different ones, that are told
_ANSWER_S = 600.0  # for one request
_FILE = "tokenizer.json"


class Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(Chunk).decode


class FailedRequestError(Exception):
    """The server did not answer this request as it should."""


@dataclass(slots=True)
class Tally:
    answered: list[Answered] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Asker:
    """Sends requests of one form and keeps their times."""

    def __init__(self, session: Any, options: argparse.Namespace) -> None:
        """`session`: aiohttp's."""
        self._session, self._options = session, options
        self._random = random.Random(options.seed)
        self._ids = plain_ids(options.tokenizer)

    async def ask(self, tally: Tally) -> None:
        body = {
            "model": self._options.model,
            "prompt": self._random.choices(self._ids, k=self._options.input_tokens),
            "max_tokens": self._options.output_tokens,
            "min_tokens": self._options.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            tally.answered.append(await self._answer(body))
        except (FailedRequestError, OSError, TimeoutError, msgspec.DecodeError, *client_errors()) as error:
            tally.errors.append(f"{type(error).__name__}: {error}")

    async def _answer(self, body: dict[str, Any]) -> Answered:
        first_at = last_at = 0.0
        usage: Usage | None = None
        sent_at = time.perf_counter()
        async with self._session.post(f"{self._options.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise FailedRequestError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = _decode(line[6:])
                if chunk.error is not None:
                    raise FailedRequestError(str(chunk.error.get("message")))
                if chunk.choices:
                    last_at = time.perf_counter()
                    first_at = first_at or last_at
                usage = chunk.usage or usage
        if usage is None or not first_at:
            raise FailedRequestError("the answer ended without usage")
        return Answered(sent_at, first_at, last_at, usage.prompt_tokens, usage.completion_tokens)


def client_errors() -> tuple[type[Exception], ...]:
    import aiohttp

    return (aiohttp.ClientError,)


def plain_ids(tokenizer: str) -> list[int]:
    """Return the ids of a tokenizer but its special ones."""
    from tokenizers import Tokenizer

    folder = Path(tokenizer)
    loaded = Tokenizer.from_file(str(folder / _FILE)) if folder.is_dir() else Tokenizer.from_pretrained(tokenizer)
    return sorted(set(loaded.get_vocab().values()) - loaded.get_added_tokens_decoder().keys())


async def closed_loop(asker: Asker, count: int, concurrency: int, tally: Tally) -> None:
    """Send `count` requests, so many under way at any time."""
    left = iter(range(count))

    async def stream() -> None:
        for _ in left:
            await asker.ask(tally)

    await asyncio.gather(*(stream() for _ in range(concurrency)))


async def open_loop(asker: Asker, count: int, rate: float, tally: Tally, seed: int) -> None:
    """Send `count` requests at random times, so many a second in the mean."""
    began = time.perf_counter()
    tasks = []
    for at in arrival_times(count, rate, seed):
        await asyncio.sleep(began + at - time.perf_counter())
        tasks.append(asyncio.create_task(asker.ask(tally)))
    await asyncio.gather(*tasks)


def arrival_times(count: int, rate: float, seed: int) -> Iterator[float]:
    """Yield when requests are sent, in seconds from the start: Poisson arrivals, the same for the same seed."""
    drawn = random.Random(seed)
    return itertools.accumulate(drawn.expovariate(rate) for _ in range(count))


async def load(options: argparse.Namespace) -> dict[str, Any]:
    import aiohttp

    limits = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        asker = Asker(session, options)
        tally, busy_s, began = Tally(), 0.0, 0.0
        for count, into in ((options.warmup, Tally()), (options.requests, tally)):
            busy_s, began = time.process_time(), time.perf_counter()
            if options.concurrency:
                await closed_loop(asker, count, options.concurrency, into)
            else:
                await open_loop(asker, count, options.rate, into, options.seed)
    busy = (time.process_time() - busy_s) / (time.perf_counter() - began)
    figures = of_requests(tally.answered, len(tally.errors)) if tally.answered else None
    return {
        "figures": msgspec.to_builtins(figures),
        "errors": list(dict.fromkeys(tally.errors))[:_NUM_ERRORS],
        "busy": round(busy, 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    print(json.dumps(asyncio.run(load(options))))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER_OR_HUB_ID")
    parser.add_argument("--input-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    pressure = parser.add_mutually_exclusive_group(required=True)
    pressure.add_argument("--concurrency", type=int, default=0)
    pressure.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
