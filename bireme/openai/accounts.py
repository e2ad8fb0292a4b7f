"""What the sequences of a frontend used: for each API key, and their lengths where Dynamo's names are asked for.

A sequence knows its key by its cache salt, so that lines of batches and background responses are charged like the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from bireme.canary_mark import is_canary
from bireme.messages import Usage
from bireme.metrics import Registry
from bireme.openai.keys import ApiKeys
from bireme.pipelines.services import SequenceAccount

OTHER = "(other)"  # no key can have this name


class AccountNames:
    """The keys that have an account of their own: as many as may, in the order in which they came."""

    def __init__(self, keys: ApiKeys, max_accounts: int) -> None:
        self._keys, self._max_accounts = keys, max_accounts
        self._known: set[str] = set()

    def of(self, cache_salt: str) -> str:
        return self.label(self._keys.name_of(cache_salt))

    def label(self, name: str) -> str:
        if name not in self._known:
            if not name or len(self._known) >= self._max_accounts:
                return OTHER
            self._known.add(name)
        return name


class Accounts:
    """Of one model. `names`: None: keys have no accounts. `has_lengths`: sequences' lengths and waits are counted."""

    def __init__(self, metrics: Registry, names: AccountNames | None, has_lengths: bool) -> None:
        self._metrics, self._names, self._has_lengths = metrics, names, has_lengths
        self._running: set[SequenceAccount] = set()

    @property
    def num_queued(self) -> int:
        """Sequences without a token."""
        return sum(not sequence.first_token_at for sequence in self._running)

    def began(self, sequences: Sequence[SequenceAccount]) -> None:
        if self._has_lengths:
            self._running.update(one for one in sequences if not is_canary(one.cache_salt))

    def ended(self, sequences: Sequence[SequenceAccount]) -> None:
        """Charge them; a prompt with several answers counts once, as in their usage, and each time it was computed."""
        self._running.difference_update(sequences)
        if is_canary(sequences[0].cache_salt):
            return
        before = None
        for sequence in sequences:
            usage = sequence.known_usage()
            if self._names is not None:
                self._charge(self._names.of(sequence.cache_salt), usage, is_first=sequence.prompt is not before)
            if self._has_lengths and usage.prompt_tokens:
                self._metrics.observe("bireme_answered_prompt_tokens", usage.prompt_tokens)
                self._metrics.observe("bireme_answered_cached_tokens", usage.cached_tokens)
                self._metrics.observe("bireme_answered_generated_tokens", usage.completion_tokens)
            before = sequence.prompt

    def embedded(self, key: str, num_tokens: int) -> None:
        """Charge a key with texts that were embedded; how long that took is not known here."""
        if self._names is not None:
            self._charge(self._names.label(key), Usage(prompt_tokens=num_tokens), is_first=True)

    def _charge(self, key: str, usage: Usage, is_first: bool) -> None:
        add = self._metrics.add
        if is_first:
            add("bireme_key_prompt_tokens_total", usage.prompt_tokens, key)
            add("bireme_key_cached_tokens_total", usage.cached_tokens, key)
        add("bireme_key_computed_tokens_total", usage.prompt_tokens - usage.cached_tokens, key)
        add("bireme_key_generated_tokens_total", usage.completion_tokens, key)
        add("bireme_key_engine_seconds_total", (usage.prefill_ms + usage.decode_ms) / 1e3, key)
