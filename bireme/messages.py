"""Messages between a consumer of tokens and an engine process, as msgpack.

A *consumer* reads steps: 0 is the decode or prefill stub itself (plain requests), n > 0 one subscription of the token
bus. The stub passes bus bytes on unread in both directions.

    command frame   u32 consumer + msgpack Commands         stub -> engine
    step frame      u32 consumer + msgpack Step             engine -> stub
    control frame   u32 CONTROL  + msgpack Hello | Pong     engine -> stub
    bus response    (u32 length + msgpack Step)*            one UINT8 tensor; late steps coalesce by appending
                    u32 WELCOME | length + msgpack Welcome  the first item of a subscription

Every command batch names the *life* of the engine that it is meant for (one incarnation of the engine process): a
submit that races a restart is refused with UNAVAILABLE, never lost and never run unseen.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from bireme import best_effort
from bireme.serving_options import NO_OPTIONS, ServingOptions

VERSION = 3  # of the forms below, compared by both ends of each connection; 3: traceparent, spans
STUB = 0
CONTROL = 0xFFFFFFFF

RequestType = Literal["context_and_generation", "context_only", "generation_only"]
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error", "not_finished"]


class TokenLogprob(NamedTuple):
    token: int
    logprob: float  # natural logarithm of its probability
    rank: int = 0  # 1: no token is likelier; 0: the engine has not said


TokenLogprobs = list[TokenLogprob]  # one position: the chosen token first, then the likeliest, best first
Logprobs = list[TokenLogprobs] | None  # an entry a token; None: none are asked for


class ProcessorCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A registered logits processor and its arguments."""

    name: str
    args: dict[str, Any] = {}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. TensorRT-LLM's field names; None is unset (engine default), 0 and false are values."""

    max_tokens: int | None = None  # None: what is left of the context
    min_tokens: int | None = None
    temperature: float | None = None  # see temperature_of
    top_k: int | None = None  # 0: off
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # unsigned 64-bit; None: drawn once at entry, so that a migrated stream goes on exactly
    is_seed_drawn: bool = False  # the entry's own: an engine without seeds may leave it out
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: tuple[str, ...] = ()  # strings; found by the detokenizer, not by the engine
    stop_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be produced
    end_id: int | None = None  # None: the model's own end-of-sequence ids
    ignore_eos: bool = False
    n: int = 1  # expanded by the entry: an engine only sees n = 1
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: and of the k likeliest
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    logits_processors: tuple[ProcessorCall, ...] = ()
    guided_decoding: dict[str, Any] | None = None  # exactly one of json, regex, grammar, json_object, ...
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


# What reading bytes raises that are no message: ValueError for texts that are no UTF-8, or checks of our own.
MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)
_LEAST_TEMPERATURE = 2.0**-126  # smaller ones may be 0 in float32, and logits / 0 are no logits


def temperature_of(params: SamplingParams) -> float:
    """Return the temperature to sample at; 0.0 is greedy. Entries and engines all ask here.

    Unset is greedy, unless top_k, top_p or min_p ask for sampling: then 1.0. Those that are off (top_k 0, min_p 0) ask
    for nothing, and neither does a seed. 0 is greedy whatever the others say, as is what float32 has no normal number
    for, and so are top_k 1 and top_p 0, which leave one token.
    """
    is_zero = params.temperature is not None and params.temperature < _LEAST_TEMPERATURE
    if is_zero or params.top_k == 1 or params.top_p == 0:
        return 0.0
    if params.temperature is not None:
        return params.temperature
    return 1.0 if params.top_k or params.top_p is not None or params.min_p else 0.0


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine needs to run one sequence."""

    prompt: bytes  # int32 little endian; ends with the resumed tokens, if any
    sampling: SamplingParams
    request_type: RequestType = "context_and_generation"
    num_resumed: int = 0  # this many ids at the end of prompt were generated before (migration)
    disaggregated_params: bytes | None = None  # signed, see disagg.py; generation_only needs it
    options: ServingOptions = NO_OPTIONS
    timeout_ms: int = 0  # from now; 0: none
    prediction: bytes = b""  # int32 little endian: what the answer may hold; a drafter looks here, too
    multimodal: bytes | None = None  # multimodal/wire.py: JSON
    dp_rank: int | None = None  # attention data parallelism: the rank that must take it; None: the engine chooses
    was_in_stall: bool = False  # its engine stalled, perhaps for its sake: it begins alone (engines/child/trials.py)
    traceparent: str = ""  # W3C's, of the span that it works for: its finish has the engine's spans; "": nobody traces
    tracestate: str = ""  # the caller's, passed on

    @property
    def is_best_effort(self) -> bool:
        return self.options.priority == best_effort.PRIORITY


class EncodeSource(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["image", "embeddings"]
    content: bytes  # a URL, or the bytes of the file


class EncodeRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pictures for the engine that has the vision tower; no tokens come of it."""

    sources: tuple[EncodeSource, ...]
    copies: int = 1  # handles for each picture
    inline: bool = False  # the embeddings themselves are wanted, too
    canary: str = ""  # what marks the launch's own (canary_mark.py)
    timeout_ms: int = 0  # from now; 0: none


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Texts for an embedding model; no tokens come of it."""

    prompts: tuple[bytes, ...]  # one a text: int32 little endian, special tokens among them
    dimensions: int = 0  # of each embedding, the first ones; 0: the model's
    canary: str = ""  # what marks the launch's own (canary_mark.py)
    timeout_ms: int = 0  # from now; 0: none


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request's account. Milliseconds are of wall time."""

    v: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompt_tokens, taken from block reuse (not by KV transfer)
    predicted_cached_tokens: int | None = None  # what the router expected; None: it follows no worker's blocks
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    decode_ms: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""

    @property
    def num_accepted(self) -> int:
        """Return how many tokens of drafts the answer has: a stop string may have cut what the engine had accepted."""
        return min(self.accepted_tokens, self.completion_tokens)


class EngineSpan(msgspec.Struct, array_like=True, frozen=True):
    """A part of what an engine did for a request (request_trace.py); times are microseconds since 1970."""

    name: str
    start_us: int
    end_us: int
    attributes: dict[str, str | int | float | bool] = {}


class Finish(msgspec.Struct, array_like=True, gc=False):
    """The end of one request; always exactly one a request."""

    reason: FinishReason
    usage: Usage
    error: str = ""  # "CODE: text" when reason is error or timeout
    stop_token_id: int | None = None  # the token that ended it; it is not among the tokens delivered
    disaggregated_params: bytes | None = None  # signed; context_only
    # of an Encode: its answer, multimodal/wire.py; of an Embed: its embeddings, float32 little endian, one a text
    encoded: bytes | None = None
    spans: list[EngineSpan] | None = None  # of a request with a traceparent


class Sink(Protocol):
    """Receives an engine's output of one request. Must be quick and must not raise."""

    def push(self, tokens: Sequence[int], logprobs: Logprobs = None, prompt_logprobs: Logprobs = None) -> None: ...

    def finish(self, finish: Finish) -> None:
        """Called exactly once, after the last push; an engine's death comes as reason `error`, UNAVAILABLE."""


class Submit(msgspec.Struct, array_like=True, tag="s", gc=False):
    number: int  # chosen by the consumer, unique within it, > 0
    request: EngineRequest


class Encode(msgspec.Struct, array_like=True, tag="e", gc=False):
    number: int
    request: EncodeRequest


class Embed(msgspec.Struct, array_like=True, tag="b", gc=False):
    number: int
    request: EmbedRequest


class Release(msgspec.Struct, array_like=True, tag="f", gc=False):
    """Free embeddings that nobody will fetch; harmless for those that are gone, and nothing is answered."""

    handles: tuple[str, ...]  # signed


class Abort(msgspec.Struct, array_like=True, tag="a", gc=False):
    number: int


class Drop(msgspec.Struct, array_like=True, tag="d", gc=False):
    """Abort everything of this consumer; it is gone, so nothing is answered."""


class Ping(msgspec.Struct, array_like=True, tag="p", gc=False):
    number: int


class Drain(msgspec.Struct, array_like=True, tag="r", gc=False):
    """Refuse new requests; finish what runs."""


Command = Submit | Encode | Embed | Release | Abort | Drop | Ping | Drain


class Commands(msgspec.Struct, array_like=True, gc=False):
    life: int
    commands: list[Command]


StartRequest = EngineRequest | EncodeRequest | EmbedRequest


def start_command(number: int, request: StartRequest) -> Submit | Encode | Embed:
    if isinstance(request, EngineRequest):
        return Submit(number, request)
    return Encode(number, request) if isinstance(request, EncodeRequest) else Embed(number, request)


class Step(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """New tokens of one consumer's requests in columns: of one engine step, or of several that travel together."""

    life: int
    number: int  # of the first engine step
    requests: list[int] = []  # in the order of their tokens; of several steps each as often as it has any
    tokens: list[int] = []  # flat, in the order of requests
    counts: list[int] | None = None  # tokens a request; None: one each
    finished: dict[int, Finish] = {}  # their requests may or may not be among `requests`
    logprobs: dict[int, list[TokenLogprobs]] | None = None  # request -> one entry a new token
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None  # entry i belongs to prompt token i + 1
    lost: bool = False  # this life is over: everything in flight is gone; `life` is the one that ended
    has_stalled: bool = False  # it stood still, and whose work it was in is not known

    def deltas(self) -> Iterator[tuple[int, list[int]]]:
        if self.counts is None:
            for request, token in zip(self.requests, self.tokens, strict=True):
                yield request, [token]
            return
        at = 0
        for request, count in zip(self.requests, self.counts, strict=True):
            yield request, self.tokens[at : at + count]
            at += count


def deliver(step: Step, sinks: dict[int, Sink], on_failure: Callable[[int, Exception], None]) -> None:
    """Give a step's tokens, then its finishes, to the sinks of their requests; finished ones are removed from `sinks`.

    `on_failure` is called for a sink that raised, in the handler of its exception; the others go on.
    """
    if step.counts is None and step.logprobs is None and step.prompt_logprobs is None:  # must be fast
        find = sinks.get
        for number, token in zip(step.requests, step.tokens, strict=True):
            sink = find(number)
            if sink is not None:
                try:
                    sink.push((token,))
                except Exception as error:
                    on_failure(number, error)
    else:
        _push_columns(step, sinks, on_failure)
    for number, finish in step.finished.items():
        if (sink := sinks.pop(number, None)) is not None:
            try:
                sink.finish(finish)
            except Exception as error:
                on_failure(number, error)


def _push_columns(step: Step, sinks: dict[int, Sink], on_failure: Callable[[int, Exception], None]) -> None:
    logprobs, prompts = step.logprobs or {}, dict(step.prompt_logprobs or {})
    pushes = [(number, tokens, prompts.pop(number, None)) for number, tokens in step.deltas()]
    pushes += [(number, [], entries) for number, entries in prompts.items()]
    for number, tokens, entries in pushes:
        if (sink := sinks.get(number)) is not None:
            try:
                sink.push(tokens, logprobs.get(number), entries)
            except Exception as error:
                on_failure(number, error)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a ready engine can take; all limits that depend on the model come from here."""

    max_seq_len: int  # prompt and generated tokens together, as many as are served: what clients are told
    max_batch_size: int
    max_num_tokens: int  # tokens in one engine step
    max_queue_size: int
    tokens_per_block: int
    num_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    load_s: float = 0.0
    dtype: str = ""
    attention_dp_size: int = 1  # ranks that hold requests and KV of their own
    lora_names: tuple[str, ...] = ()
    image_token_id: int | None = None  # the placeholder of pictures; None: the model takes text only
    encodes_images: bool = False  # it has the vision tower: takes Encode and Release
    embedding_size: int = 0  # of an embedding, all its dimensions; 0: it takes no Embed
    step_paths: tuple[str, ...] = ()  # what computes its steps, the most special first; empty: it does not say
    prompt_attention: tuple[str, ...] = ()  # what attends to prompts in the last of these, likewise; of a GPU
    nextn: int = 0  # tokens of a draft at the most, Dynamo's name for it; 0: nothing is drafted

    def within_pool(self) -> Capacity:
        """Return it with no longer a sequence than the KV pool holds: for an engine that keeps all of a sequence."""
        held = self.num_blocks * self.tokens_per_block
        return msgspec.structs.replace(self, max_seq_len=held) if 0 < held < self.max_seq_len else self


class Hello(msgspec.Struct, array_like=True, tag="h", gc=False):
    """First message of a life: loaded, warmed up and ready, or failed for good (`error`)."""

    version: int
    life: int
    capacity: Capacity | None = None
    error: str = ""
    facts: bytes = b""  # what an engine that does not speak tokens takes, instead of capacity


class Pong(msgspec.Struct, array_like=True, tag="o", gc=False):
    """Answer of the engine's IO thread to a ping, also during a step."""

    number: int
    life: int
    step: int  # steps done
    step_age_ms: float  # how long the current step has been running; 0: none is
    num_waiting: int
    num_running: int
    metrics: bytes = b""  # msgpack of metrics.Delta: what changed since the last pong


class Welcome(msgspec.Struct, array_like=True, gc=False):
    """First item of a bus subscription, which lasts for one life of the engine."""

    version: int
    consumer: str  # random, made by the stub: its holder may command this subscription
    life: int
    capacity: Capacity


WELCOME = 0x80000000  # flag in an item's length
U32 = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_commands = msgspec.msgpack.Decoder(Commands).decode
decode_request = msgspec.msgpack.Decoder(Submit | Encode | Release).decode
decode_embed = msgspec.msgpack.Decoder(Embed).decode
decode_step = msgspec.msgpack.Decoder(Step).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
decode_control = msgspec.msgpack.Decoder(Hello | Pong).decode
decode_spans = msgspec.msgpack.Decoder(list[EngineSpan]).decode


def frame(consumer: int, payload: bytes | memoryview) -> bytes:
    return b"".join((U32.pack(consumer), payload))


def split(data: bytes) -> tuple[int, memoryview]:
    return U32.unpack_from(data)[0], memoryview(data)[4:]


def pack_welcome(welcome: Welcome) -> bytes:
    payload = encode(welcome)
    return U32.pack(WELCOME | len(payload)) + payload


def unpack_bus(data: bytes) -> Iterator[Step | Welcome]:
    view, at = memoryview(data), 0
    while at < len(view):
        head = U32.unpack_from(view, at)[0]
        end = at + 4 + (head & ~WELCOME)
        item = view[at + 4 : end]
        yield decode_welcome(item) if head & WELCOME else decode_step(item)
        at = end
