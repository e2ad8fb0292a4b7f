"""What drafters with rows of their own keep: a sequence under the model's block ids, and whose rows a block has."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bireme.engines.torch.step import DraftedSequence
from bireme.engines.torch.step import Sequence as OpenSequence
from bireme.kv.blocks.block_manager import BlockTable
from bireme.kv.blocks.block_pool import BlockPool
from bireme.logits.rows import Row
from bireme.messages import SamplingParams

GROUP = 0  # of the model's, whose block ids drafters have: the one that sees most
_UNKNOWN = b""


class KnownBlocks:
    """By id the hash of what a full block has in a drafter's pools, until a row of it is written again.

    `blocks` and `hashes` are a sequence's; tokens are counted from its first block.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self._hashes, self._size = [_UNKNOWN] * (num_blocks + 1), tokens_per_block

    def end_of_known(self, blocks: Sequence[int], hashes: Sequence[bytes], number: int, last: int) -> int:
        """Return the first block from `number` on that is not known; at most `last`."""
        while number < min(last, len(hashes)) and self._hashes[blocks[number]] == hashes[number]:
            number += 1
        return number

    def forget(self, blocks: Sequence[int], first: int, end: int) -> None:
        """Rows of tokens [first, end) are going to be written."""
        for block in blocks[first // self._size : -(-end // self._size)]:
            self._hashes[block] = _UNKNOWN

    def remember(self, blocks: Sequence[int], hashes: Sequence[bytes], num_computed: int, first: int) -> None:
        """Rows of so many tokens are there, from block `first` on."""
        for number in range(min(num_computed // self._size, len(hashes)) - 1, first - 1, -1):
            if self._hashes[blocks[number]] == hashes[number]:
                break
            self._hashes[blocks[number]] = hashes[number]


class SeenBlocks:
    """Which blocks of the model's have the rows of a head, as their pool keeps it. `blocks` are a sequence's."""

    def __init__(self, pool: BlockPool, tokens_per_block: int) -> None:
        """`pool`: of the device, of GROUP."""
        self._pool, self._size = pool, tokens_per_block

    def num_seen(self, blocks: Sequence[int], most: int) -> int:
        """Return how many blocks from the first on are; at most so many."""
        return next((at for at, block in enumerate(blocks[:most]) if not self._pool.is_seen(block)), most)

    def forget(self, blocks: Sequence[int], first: int, end: int) -> None:
        """Rows of tokens [first, end) are going to be written."""
        for block in blocks[first // self._size : -(-end // self._size)]:
            self._pool.set_seen(block, False)

    def remember(self, blocks: Sequence[int], first: int, end: int) -> None:
        """Rows of tokens [first, end) were written, and those before them in the same block."""
        for block in blocks[first // self._size : end // self._size]:
            self._pool.set_seen(block)


def follow(sequence: OpenSequence, num_groups: int, vocab_size: int) -> DraftedSequence:
    """Return the sequence as a drafter has it, without tokens. `num_groups`: of the drafter's pools."""
    table = BlockTable([sequence.table.blocks[GROUP]] * num_groups, [], [], b"", 0, "", "")
    own = OpenSequence(
        sequence.key, sequence.request, [], sequence.num_prompt, sequence.max_tokens, frozenset(), 0.0, table
    )
    own.slot, own.mirrored = sequence.slot, [0] * num_groups
    return DraftedSequence(own, Row(_drawn_alike(sequence.sampling), (), (), tuple(sequence.stop_ids), vocab_size))


def _drawn_alike(sampling: SamplingParams) -> SamplingParams:
    """Return what holds for a token by itself; the rest depends on those before it."""
    return msgspec.structs.replace(
        sampling,
        presence_penalty=None,
        frequency_penalty=None,
        repetition_penalty=None,
        bad_token_ids=tuple(ids for ids in sampling.bad_token_ids if len(ids) == 1),
        logits_processors=(),
        guided_decoding=None,
        logprobs=None,
    )
