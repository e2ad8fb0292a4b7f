"""Guided decoding in this engine: which requests may use it, and guides compiled while their requests wait.

A guide is compiled off the engine's thread; its request waits in the engine, where abort and deadline reach it, and
joins the queue when the guide is ready. A loose guide that can't be had leaves its request unguided, as the log says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bireme.config import EngineConfig, Limits
from bireme.engines.torch.step import Post
from bireme.engines.torch.step import Sequence as Request
from bireme.errors import BiremeError, ConfigError, RequestError, UnavailableError
from bireme.guides import TRIGGER, Guide, parse_guide
from bireme.logits.guided.compiler import GuideCompiler, is_installed
from bireme.logits.guided.guidance import Guidance
from bireme.logits.guided.triggered import TriggeredGuidance
from bireme.logits.guided.vocabulary import TokenTable, make_table
from bireme.messages import SamplingParams
from bireme.own_work import OwnWork, Work
from bireme.text import vocabulary

logger = logging.getLogger("bireme.engines")
_MAX_TOLD = 256  # reasons in the log, each once; then they are told again
# The gate has checked the recipe's limits; only the guide is left to read.
_ANY_SIZE = Limits(max_guide_bytes=1 << 31, max_guide_depth=1 << 31, max_guide_choices=1 << 31)
Done = Callable[[Request, BiremeError | None], None]


class TorchGuides:
    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_ids: Sequence[int],
        config: EngineConfig,
        post: Post,
        own_work: OwnWork,
    ) -> None:
        tokenizer = folder / "tokenizer.json"
        self._config = config
        self._post, self._own_work = post, own_work
        self._told: set[str] = set()
        self._obstacle_here = _obstacle(tokenizer, config.guided_decoding_backend)
        self.compiler = GuideCompiler(
            partial(_load_table, tokenizer, vocab_size), eos_ids, config.guided_decoding_config
        )

    def check(self, sampling: SamplingParams, eos_ids: Sequence[int]) -> None:
        """Raise RequestError when this engine can't follow a guide. Any thread."""
        raw = sampling.guided_decoding
        is_loose = isinstance(raw, Mapping) and isinstance(raw.get(TRIGGER), Mapping) and raw[TRIGGER].get("is_loose")
        if raw is not None and not is_loose and (obstacle := self._obstacle(sampling, eos_ids)):
            raise RequestError(obstacle)

    def _obstacle(self, sampling: SamplingParams, eos_ids: Sequence[int]) -> str:
        """Return why this engine can't follow any guide; "": it can."""
        if self._obstacle_here:
            return self._obstacle_here
        if sampling.ignore_eos:
            return "ignore_eos: with guided_decoding the guide says where the answer ends; leave it out"
        return "" if eos_ids else "guided_decoding: the model has no end-of-sequence id; send end_id"

    def prepare(self, request: Request, eos_ids: Sequence[int], done: Done) -> None:
        """Compile the request's guide and give it its guidance; then `done` is posted, with any error."""
        guide = parse_guide(request.sampling.guided_decoding, _ANY_SIZE)

        def answer(compiled: Any) -> None:
            self._post(partial(self._ready, request, compiled, guide, tuple(eos_ids), done))

        if obstacle := self._obstacle(request.sampling, eos_ids):  # of a loose one; the others have been refused
            answer(RequestError(obstacle))
        else:
            self.compiler.compile(guide, answer)

    def close(self) -> None:
        self.compiler.close()

    def _ready(self, request: Request, compiled: Any, guide: Guide, eos_ids: tuple[int, ...], done: Done) -> None:
        error: BiremeError | None = None
        try:
            request.guidance = self._guidance(request, compiled, guide, eos_ids)
        except BiremeError as found:
            error = found
        except Exception as found:
            error = BiremeError(f"guided_decoding: {type(found).__name__}: {found}")
        is_loose = guide.trigger is not None and guide.trigger.is_loose
        if error is not None and is_loose and not isinstance(error, UnavailableError):
            self._tell(str(error))
            error = None
        done(request, error)

    def _guidance(self, request: Request, compiled: Any, guide: Guide, eos_ids: tuple[int, ...]) -> Guidance:
        if isinstance(compiled, BiremeError):
            raise compiled
        limit_s = self._config.guided_decoding_config.max_token_ms / 1e3
        mark, table, end = self._own_work.mark(request.key, Work.GUIDE), self.compiler.table, guide.reasoning_end
        guidance = (
            Guidance(compiled, table, eos_ids, end, limit_s, mark)
            if guide.trigger is None
            else TriggeredGuidance(compiled, table, eos_ids, guide.trigger, end, limit_s, mark)
        )
        for token in request.tokens[request.num_prompt :]:  # what another engine made before it was lost
            if token in eos_ids:
                raise RequestError(f"resumed_output_ids: token {token} ends the answer; nothing is left to be made")
            guidance.accept(token)
        return guidance

    def _tell(self, reason: str) -> None:
        if reason in self._told:
            return
        if len(self._told) >= _MAX_TOLD:
            self._told.clear()
        self._told.add(reason)
        logger.warning("guide_left_out reason=%r", reason)


def _obstacle(tokenizer: Path, backend: str | None) -> str:
    """Return why no request of this engine can be guided."""
    if backend is None:
        return "guided_decoding: guided_decoding_backend is null here; set xgrammar, or leave it out"
    if not is_installed():
        return "guided_decoding: xgrammar is not installed on this worker; pip install xgrammar"
    if not tokenizer.exists():
        return "guided_decoding: the model's folder has no tokenizer.json; it is needed for guides"
    return ""


def _load_table(path: Path, vocab_size: int) -> TokenTable:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    table = vocabulary.build(tokenizer)
    if table is None:
        raise ConfigError("guided_decoding: this model's tokenizer has no bytes of its own for each token (decoder)")
    special_ids = [at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return make_table(table.texts, table.parts, special_ids, vocab_size)
