"""Stop strings in a stream of text: found across any cut, never leaked, nothing else delayed.

The first stop string to be complete ends the text; of several complete at the same character, the longest. Each is
followed by a Knuth-Morris-Pratt automaton, so the cost per character is constant, however repetitive they are.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Follower:
    """How much of one stop string the text so far ends with."""

    __slots__ = ("_failure", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._failure = _failure(stop)
        self.matched = 0  # characters at the end of the text that may become the stop string

    def advance(self, text: str) -> int | None:
        """Take more text; return the index after the stop string's last character, if it is complete."""
        stop, matched = self._stop, self.matched
        if not matched and stop[0] not in text:
            return None
        for at, character in enumerate(text):
            while matched and stop[matched] != character:
                matched = self._failure[matched - 1]
            if stop[matched] == character:
                matched += 1
                if matched == len(stop):
                    return at + 1
        self.matched = matched
        return None

    def skip(self, text: str) -> None:
        """Take more text; a stop string that it completes does not count."""
        while (end := self.advance(text)) is not None:
            self.matched = self._failure[-1]
            text = text[end:]

    @property
    def stop(self) -> str:
        return self._stop


class StopFinder:
    """Follows all stop strings of one request."""

    __slots__ = ("_beginnings", "_followers", "_held", "_includes_stop", "is_stopped", "stop_string")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._followers = [_Follower(stop) for stop in stops if stop]
        self._beginnings = frozenset(stop[0] for stop in stops if stop)
        self._includes_stop = include_stop
        self._held = ""
        self.is_stopped = False
        self.stop_string = ""  # the one that ended the text

    def push(self, text: str) -> str:
        """Take more text and return what can go out; after the stop (`is_stopped`) there is no more."""
        if self.is_stopped:
            return ""
        if not self._held and self._beginnings.isdisjoint(text):  # nearly every call
            return text
        ends = [
            (end, -len(follower.stop), follower.stop)
            for follower in self._followers
            if (end := follower.advance(text)) is not None
        ]
        whole = self._held + text
        if ends:
            self.is_stopped = True
            end, negative_length, self.stop_string = min(ends)
            end += len(self._held)
            self._held = ""
            return whole[: end if self._includes_stop else end + negative_length]
        return self._certain(whole)

    def skip(self, text: str) -> str:
        """Take more text, in which no stop string may end, and return what can go out."""
        if not self._held and self._beginnings.isdisjoint(text):
            return text
        for follower in self._followers:
            follower.skip(text)
        return self._certain(self._held + text)

    def _certain(self, whole: str) -> str:
        """Hold back what may become a stop string."""
        num_held = max(follower.matched for follower in self._followers)
        out = len(whole) - num_held
        self._held = whole[out:]
        return whole[:out]

    def flush(self) -> str:
        """Return what is held back: the text has ended, so it was no stop string."""
        text, self._held = self._held, ""
        return text


def _failure(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that `stop` begins with."""
    failure = [0] * len(stop)
    matched = 0
    for at in range(1, len(stop)):
        while matched and stop[matched] != stop[at]:
            matched = failure[matched - 1]
        if stop[matched] == stop[at]:
            matched += 1
        failure[at] = matched
    return failure
