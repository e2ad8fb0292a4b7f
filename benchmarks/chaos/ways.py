"""Every way into a launch: its door, the processes that a request of it needs, its client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.load.grpc_streams import GrpcStreams
from benchmarks.load.http_streams import HttpStreams
from benchmarks.load.openai_answers import OpenAIAnswers
from benchmarks.load.runner import Client
from benchmarks.load.token_bus import TokenBus
from benchmarks.load.whole_answers import GrpcCalls, HttpCalls

Door = Literal["grpc", "http", "openai"]


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    door: Door
    entry: str  # the Triton model that the client calls; "": the frontend
    is_direct: bool = False  # the client calls one worker itself: nobody moves its requests
    has_text: bool = False  # its prompt is text, which the tokenizer encodes
    is_probed: bool = True

    def needs(self, model: str) -> bool:
        """Return whether a request of this way can meet the stub or the engine of a model."""
        if self.is_direct:
            return model == self.entry
        kind = model.partition("_")[0]
        return model == self.entry or kind in ("prefill", "decode") or (kind == "tokenizer" and self.has_text)


def ways_of(num_decode: int) -> dict[str, Way]:
    """Return name -> way. Each decode worker can be called by itself as well."""
    found = [
        Way("grpc_stream", "grpc", "generate"),
        Way("grpc_unary", "grpc", "completion"),
        Way("http_stream", "http", "generate"),
        Way("http_unary", "http", "completion", has_text=True),
        Way("chat_stream", "openai", ""),
        Way("chat", "openai", ""),
        Way("completions_stream", "openai", ""),
        Way("completions", "openai", ""),
        Way("slow_reader", "openai", "", is_probed=False),
        Way("bus", "grpc", "decode", is_direct=True, is_probed=False),
    ]
    direct = ["decode", *(f"decode_{number}" for number in range(1, num_decode))]
    found += [Way(name, "grpc", name, is_direct=True) for name in direct]
    return {way.name: way for way in found}


def make_client(way: Way, addresses: Mapping[str, str], served_name: str) -> Client:
    """Return a client of its own for a way; `addresses`: door -> host:port."""
    target = addresses[way.door]
    if way.door == "openai":
        return OpenAIAnswers(
            target,
            served_name,
            is_chat=way.name.startswith(("chat", "slow")),
            is_streamed=way.name.endswith(("stream", "reader")),
            reads_slowly=way.name == "slow_reader",
        )
    if way.name == "bus":
        return TokenBus(target)
    if way.name == "grpc_unary":
        return GrpcCalls(target)
    if way.name == "http_unary":
        return HttpCalls(target, sends_text=True)
    if way.name == "http_stream":
        return HttpStreams(target)
    return GrpcStreams(target, way.entry, stream_per_request=not way.is_direct)
