"""Random requests of all APIs, each with a trace of its own: some leave, and engines are killed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from bireme.request_trace import new_trace_id
from tests.observability.collector import attributes_of, flaws, is_root

_WORDS = "the oars of the upper bank strike as one and the hull runs on before the wind".split()
_AT_ONCE = 24


@dataclass
class Asked:
    """One request and what its client saw of it."""

    path: str
    leaves: bool  # its client goes away after the first bytes
    trace_id: str = field(default_factory=new_trace_id)
    status: int = 0  # 0: no answer

    @property
    def headers(self) -> dict[str, str]:
        return {"traceparent": f"00-{self.trace_id}-{random.getrandbits(64) or 1:016x}-01"}


def _body(path: str, model: str, draw: random.Random) -> dict[str, Any]:
    text = " ".join(draw.choices(_WORDS, k=draw.randint(3, 400)))
    length, is_streamed = draw.randint(2, 40), draw.random() < 0.6
    common: dict[str, Any] = {"model": model, "stream": is_streamed}
    if path == "/v1/completions":
        return common | {"prompt": text, "max_tokens": length, "n": draw.choice((1, 1, 2))}
    if path == "/v1/responses":
        return common | {"input": text, "max_output_tokens": length, "store": False}
    return common | {"messages": [{"role": "user", "content": text}], "max_tokens": length}


_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


async def ask_many(url: str, model: str, count: int, kill: Callable[[], None], seed: int = 1) -> list[Asked]:
    """Send so many requests; `kill` is called four times meanwhile. Return what was asked, when all have ended."""
    draw, gate = random.Random(seed), asyncio.Semaphore(_AT_ONCE)
    jobs = [Asked(draw.choice(_PATHS), leaves=draw.random() < 0.2) for _ in range(count)]
    bodies = [_body(job.path, model, draw) for job in jobs]
    kills = {count * part // 5 for part in range(1, 5)}
    limits = httpx.Limits(max_connections=2 * _AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def ask(at: int) -> None:
            async with gate:
                if at in kills:
                    await asyncio.to_thread(kill)
                with contextlib.suppress(httpx.HTTPError):
                    await _ask(client, jobs[at], bodies[at])

        await asyncio.gather(*(ask(at) for at in range(count)))
    return jobs


async def _ask(client: httpx.AsyncClient, job: Asked, body: dict[str, Any]) -> None:
    if job.leaves and not body["stream"]:
        with contextlib.suppress(TimeoutError):
            job.status = (
                await asyncio.wait_for(client.post(job.path, json=body, headers=job.headers), 0.1)
            ).status_code
        return
    async with client.stream("POST", job.path, json=body, headers=job.headers) as reply:
        job.status = reply.status_code
        async for _ in reply.aiter_bytes():
            if job.leaves:
                return


def kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def missing(job: Asked, spans: list[Any]) -> list[str]:
    """Return what a request's tree lacks."""
    if not any(is_root(span) for span in spans):
        return [f"no root of {len(spans)} spans"]
    found = flaws(spans)
    [root] = [span for span in spans if is_root(span)]
    status, outcome = attributes_of(root)["http.response.status_code"], attributes_of(root).get("bireme.outcome")
    if status != 200 or outcome not in ("stop", "length"):
        return found if root.status.message else [*found, f"no reason at status {status}, outcome {outcome}"]
    names = [span.name for span in spans]
    found += [
        f"no {name}" for name in ("tokenize", "attempt", "route", "decode", "queue", "generate") if name not in names
    ]
    for attempt in (span for span in spans if span.name == "attempt"):
        parts = {span.name: span for span in spans if span.parent_span_id == attempt.span_id}
        if "route" not in parts:
            found.append("an attempt without its placement")
        elif not attempt.status.message and "decode" not in parts:
            found.append("an attempt that went well without decode")
    return found
