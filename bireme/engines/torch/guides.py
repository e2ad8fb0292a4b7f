"""Guided decoding in this engine: which requests may use it, and guides compiled while their requests wait.

A guide is compiled off the engine's thread; its request waits in the engine, where abort and deadline reach it, and
joins the queue when the guide is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bireme.config import EngineConfig, Limits
from bireme.engines.torch.disaggregation import Post
from bireme.engines.torch.sequence import Sequence as Request
from bireme.errors import BiremeError, ConfigError, RequestError
from bireme.guides import parse_guide
from bireme.logits.guided.compiler import GuideCompiler, is_installed
from bireme.logits.guided.guidance import Guidance
from bireme.logits.guided.vocabulary import TokenTable, make_table
from bireme.messages import SamplingParams
from bireme.own_work import OwnWork, Work
from bireme.text import vocabulary

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
        self._tokenizer = folder / "tokenizer.json"
        self._config = config
        self._post, self._own_work = post, own_work
        self.compiler = GuideCompiler(
            partial(_load_table, self._tokenizer, vocab_size), eos_ids, config.guided_decoding_config
        )

    def check(self, sampling: SamplingParams, eos_ids: Sequence[int]) -> None:
        """Raise RequestError when this engine can't follow a guide. Any thread."""
        if sampling.guided_decoding is None:
            return
        if self._config.guided_decoding_backend is None:
            raise RequestError("guided_decoding: guided_decoding_backend is null here; set xgrammar, or leave it out")
        if not is_installed():
            raise RequestError("guided_decoding: xgrammar is not installed on this worker; pip install xgrammar")
        if not self._tokenizer.exists():
            raise RequestError("guided_decoding: the model's folder has no tokenizer.json; it is needed for guides")
        if sampling.ignore_eos:
            raise RequestError("ignore_eos: with guided_decoding the guide says where the answer ends; leave it out")
        if not eos_ids:
            raise RequestError("guided_decoding: the model has no end-of-sequence id; send end_id")

    def prepare(self, request: Request, eos_ids: Sequence[int], done: Done) -> None:
        """Compile the request's guide and give it its guidance; then `done` is posted, with any error."""
        guide = parse_guide(request.sampling.guided_decoding, _ANY_SIZE)

        def answer(compiled: Any) -> None:
            self._post(partial(self._ready, request, compiled, guide.reasoning_end, tuple(eos_ids), done))

        self.compiler.compile(guide, answer)

    def close(self) -> None:
        self.compiler.close()

    def _ready(self, request: Request, compiled: Any, reasoning_end: str, eos_ids: tuple[int, ...], done: Done) -> None:
        try:
            if isinstance(compiled, BiremeError):
                raise compiled
            limit_s = self._config.guided_decoding_config.max_token_ms / 1e3
            mark = self._own_work.mark(request.key, Work.GUIDE)
            guidance = Guidance(compiled, self.compiler.table, eos_ids, reasoning_end, limit_s, mark)
            for token in request.tokens[request.num_prompt :]:  # what another engine made before it was lost
                if token in eos_ids:
                    raise RequestError(f"resumed_output_ids: token {token} ends the answer; nothing is left to be made")
                guidance.accept(token)
            request.guidance = guidance
        except BiremeError as error:
            done(request, error)
        except Exception as error:
            done(request, BiremeError(f"guided_decoding: {type(error).__name__}: {error}"))
        else:
            done(request, None)


def _load_table(path: Path, vocab_size: int) -> TokenTable:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    table = vocabulary.build(tokenizer)
    if table is None:
        raise ConfigError("guided_decoding: this model's tokenizer has no bytes of its own for each token (decoder)")
    special_ids = [at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return make_table(table.texts, table.parts, special_ids, vocab_size)
