"""An EngineClient without a process, for tests of stages and of the token bus: the test makes the steps."""

from __future__ import annotations

from collections.abc import Callable

from bireme.errors import UnavailableError
from bireme.messages import (
    STUB,
    Abort,
    Capacity,
    Encode,
    Finish,
    Release,
    Sink,
    StartRequest,
    Step,
    Submit,
    Usage,
    decode_commands,
    encode,
)

CAPACITY = Capacity(
    max_seq_len=1024,
    max_batch_size=8,
    max_num_tokens=1024,
    max_queue_size=8,
    tokens_per_block=32,
    num_blocks=64,
    vocab_size=1000,
)


class FakeEngineClient:
    """(consumer, number) names a request, consumer 0 is the stub itself."""

    def __init__(self) -> None:
        self.number_of_life = 1
        self.is_ready = True
        self.is_connected = True  # commands reach the process
        self.state = "ready"
        self.is_started = self.is_stopped = False
        self.requests: dict[tuple[int, int], StartRequest] = {}
        self.released: list[str] = []
        self.aborted: list[tuple[int, int]] = []
        self.payloads: list[bytes] = []
        self.sinks: dict[int, Sink] = {}
        self.buses: dict[int, Callable[[bytes], None]] = {}
        self._count = 0

    @property
    def life(self) -> int:
        self._require()
        return self.number_of_life

    @property
    def capacity(self) -> Capacity:
        self._require()
        return CAPACITY

    def start(self) -> None:
        self.is_started = True

    def stop(self) -> None:
        self.is_stopped = True

    def submit(self, request: StartRequest, sink: Sink) -> int:
        self._require()
        self._count += 1
        self.requests[STUB, self._count] = request
        self.sinks[self._count] = sink
        return self._count

    def release(self, handles: tuple[str, ...]) -> None:
        self._require()
        self.released += handles

    def abort(self, number: int) -> None:
        self.aborted.append((STUB, number))
        if number in self.sinks:
            self.finish(STUB, number, Finish("cancelled", Usage()))

    def open_bus(self, push: Callable[[bytes], None]) -> int:
        self._require()
        self._count += 1
        self.buses[self._count] = push
        return self._count

    def send_commands(self, consumer: int, payload: bytes) -> None:
        if consumer not in self.buses:
            raise UnavailableError("this subscription has ended with its engine life")
        if not self.is_connected:
            raise UnavailableError("the engine process of decode is not connected")
        self.payloads.append(payload)
        for command in decode_commands(payload).commands:
            if isinstance(command, (Submit, Encode)):
                self.requests[consumer, command.number] = command.request
            elif isinstance(command, Release):
                self.release(command.handles)
            elif isinstance(command, Abort) and (consumer, command.number) in self.requests:
                self.aborted.append((consumer, command.number))
                self.finish(consumer, command.number, Finish("cancelled", Usage()))

    def close_bus(self, consumer: int) -> None:
        self.buses.pop(consumer, None)
        for key in [key for key in self.requests if key[0] == consumer]:
            del self.requests[key]
            self.aborted.append(key)

    def emit(self, consumer: int, tokens: dict[int, int]) -> None:
        if consumer == STUB:
            for number, token in tokens.items():
                self.sinks[number].push((token,))
        else:
            self.buses[consumer](encode(Step(self.number_of_life, 1, list(tokens), list(tokens.values()))))

    def finish(self, consumer: int, number: int, finish: Finish) -> None:
        self.requests.pop((consumer, number), None)
        if consumer == STUB:
            self.sinks.pop(number).finish(finish)
        elif consumer in self.buses:
            self.buses[consumer](encode(Step(self.number_of_life, 2, finished={number: finish})))

    def die(self) -> None:
        buses, self.buses = self.buses, {}
        sinks, self.sinks = self.sinks, {}
        self.requests.clear()
        self.is_ready, self.state = False, "its engine died (signal SIGKILL) and is being restarted"
        for sink in sinks.values():
            sink.finish(Finish("error", Usage(), error="UNAVAILABLE: engine lost: it died"))
        for push in buses.values():
            push(encode(Step(self.number_of_life, 0, lost=True)))

    def come_back(self) -> None:
        self.number_of_life += 1
        self.is_ready, self.state = True, "ready"

    def _require(self) -> None:
        if not self.is_ready:
            raise UnavailableError(self.state)
