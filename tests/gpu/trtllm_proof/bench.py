"""An engine under proof, the model that it serves, and the same model on the CPU.

The model is made here: a Llama of two layers in bfloat16 with random weights, heads of 64 and a vocabulary of 4,096,
sizes for which every release has kernels. What a token's logits should be, reference.py says in float32. Two tokens
may be as good as each other in bfloat16, so an answer is never compared with another answer: each of its tokens must
be the best one behind the tokens before it, or nearly so.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.disagg import DisaggregatedParams
from bireme.errors import RequestError
from bireme.messages import Finish, TokenLogprobs
from tests.contract.trtllm_harness import UNSET, Answer, Harness
from tools.make_sample_model import make

if TYPE_CHECKING:
    from torch import Tensor

    from tests.gpu.trtllm_proof.reference import Reference

SHAPE: dict[str, Any] = {
    "hidden": 256,
    "intermediate": 512,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "vocab": 4096,  # an engine on a CPU spends most of a step on the head
    "max_position": 2048,
    "dtype": "bfloat16",
}
NEARLY = 0.5  # of logits, whose deviation is 1.7: bfloat16 moves them by up to 0.15, a wrong token lies 6 below
NEAR_LOGPROB = 0.25
_FIRST_ID = 300  # below lie special tokens and single bytes


class Failed(Exception):
    """It was tried and is wrong."""


class Skipped(Exception):
    """It can't be tried here; the text says why."""


def require(is_right: object, text: str) -> None:
    if not is_right:
        raise Failed(text)


def check_logprob(token: int, logprob: float, row: Tensor) -> None:
    expected = float(row[token])
    require(
        abs(logprob - expected) < NEAR_LOGPROB,
        f"log probability of token {token}: {logprob:.2f}, by the reference {expected:.2f}",
    )


@dataclass
class Done:
    """A request that has ended without an error."""

    prompt: list[int]
    answer: Answer
    finish: Finish

    @property
    def tokens(self) -> list[int]:
        return self.answer.tokens

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return self.answer.logprobs

    @property
    def num_cached(self) -> int:
        return self.finish.usage.cached_tokens


@dataclass
class Bench:
    """One engine process's."""

    folder: Path
    stage: str
    yaml: dict[str, Any]
    limit_s: float = 1e6  # for an answer: the program has limits of its own
    wait_s: float = 10.0  # for what comes after an answer: events, statistics
    warnings: list[str] = field(default_factory=list)
    _engine: Harness | None = None
    _counter: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def make_model(self) -> Path:
        return make(self.model, **SHAPE)

    def start(self) -> Harness:
        # Harness has defaults for small models in float32.
        self._engine = Harness(self.stage, self.model, {"dtype": UNSET} | self.yaml)
        return self._engine

    @property
    def engine(self) -> Harness:
        assert self._engine is not None, "the row `start` comes first"
        return self._engine

    @property
    def api(self) -> Any:
        assert self.engine.engine._loaded is not None
        return self.engine.engine._loaded.api

    @property
    def has_ended(self) -> bool:
        return self._engine is not None and bool(self._engine.exits)

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.engine.stop()

    def prompt(self, length: int = 40) -> list[int]:
        """Return one that no request has had."""
        draw = random.Random(next(self._counter))
        return [draw.randrange(_FIRST_ID, self.engine.capacity.vocab_size) for _ in range(length)]

    def begin(self, prompt: list[int], params: DisaggregatedParams | None = None, **fields: Any) -> Answer:
        """Submit it, with a salt of its own unless one is given: what was computed before is not reused."""
        fields = {"cache_salt": f"proof {next(self._counter)}", "max_tokens": 12} | fields
        return self.engine.ask(prompt, params, **fields)

    def end(self, prompt: list[int], answer: Answer) -> Done:
        """Wait for its end. Raises Failed for an error."""
        finish = answer.wait(self.limit_s)
        require(not finish.error, f"a request ended with {finish.error}")
        return Done(prompt, answer, finish)

    def ask(self, prompt: list[int], params: DisaggregatedParams | None = None, **fields: Any) -> Done:
        return self.end(prompt, self.begin(prompt, params, **fields))

    @cached_property
    def greedy(self) -> Done:
        """One answer of 16 tokens, for rows that begin with a known one."""
        return self.ask(self.prompt(), max_tokens=16, ignore_eos=True)

    def refusal(self, **fields: Any) -> str:
        """Return with which words a request is refused. Raises Failed where it is served."""
        try:
            self.ask(self.prompt(), **fields)
        except RequestError as error:
            return str(error)
        raise Failed(f"{', '.join(fields)}: taken, and this release ignores it")

    def wait_for(self, is_there: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + self.wait_s
        while not is_there():
            require(time.monotonic() < deadline, what)
            time.sleep(0.02)

    @cached_property
    def _reference(self) -> Reference:
        from tests.gpu.trtllm_proof.reference import Reference

        return Reference(self.model)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self._reference.logits(tokens)

    def logits_of(self, done: Done) -> Tensor:
        """Return those that each of an answer's tokens was chosen from."""
        return self.logits([*done.prompt, *done.tokens])[len(done.prompt) - 1 : -1]

    def check_greedy(self, done: Done) -> None:
        """Raises Failed unless every token is the model's best, or nearly."""
        for at, (token, row) in enumerate(zip(done.tokens, self.logits_of(done), strict=True)):
            short = float(row.max() - row[token])
            if short > NEARLY:
                raise Failed(
                    f"token {at} of a greedy answer is {token}, whose logit is {short:.1f} below that of"
                    f" {int(row.argmax())}, the best by the reference"
                )
