"""The ways to the engine, by name, and what the mocker must answer on all of them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.load.runner import Client
from benchmarks.load.workload import Workload, make_chat_workload, make_workload, tokenizer_text

PATHS = ("engine", "bus", "decode", "generate", "http", "sse")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    target: str = "127.0.0.1:8001"  # gRPC; for `http` the HTTP address, for `sse` the OpenAI frontend's
    stream_per_request: bool = False
    model_path: str = "models/tiny-llama"
    step_ms: float = 5.0  # of the engine in process
    step_log: str = ""


def make_client(path: str, options: ClientOptions) -> Client:
    """Return the client of a path: decode_1 or any other decoupled model's name also goes over gRPC streams."""
    if path == "engine":
        from benchmarks.load.in_process import InProcess

        return InProcess(options.model_path, options.step_ms, options.step_log)
    if path == "bus":
        from benchmarks.load.token_bus import TokenBus

        return TokenBus(options.target)
    if path == "http":
        from benchmarks.load.http_streams import HttpStreams

        return HttpStreams(options.target)
    if path == "sse":
        from benchmarks.load.sse_streams import SseStreams

        return SseStreams(options.target)
    from benchmarks.load.grpc_streams import GrpcStreams

    return GrpcStreams(options.target, path, options.stream_per_request)


def mocker_workload(
    model_path: str, num_prompts: int, prompt_tokens: int, max_tokens: int, has_chats: bool = False
) -> Workload:
    """Return prompts for the mocker engine, whose answers are known; with `has_chats` conversations."""
    from bireme.engines.mocker.tokens import expected_tokens, printable_ids

    ids, vocab_size = printable_ids(model_path)
    if has_chats:
        return make_chat_workload(
            lambda prompt, n: expected_tokens(prompt, n, ids),
            model_path,
            num_prompts=num_prompts,
            max_tokens=max_tokens,
        )
    return make_workload(
        lambda prompt, n: expected_tokens(prompt, n, ids),
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        vocab_size=vocab_size,
        to_text=tokenizer_text(model_path),
    )
