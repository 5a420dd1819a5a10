"""Stop texts, matched character by character (Knuth, Morris, Pratt 1977), so that no chunking changes the result."""

from __future__ import annotations

from collections.abc import Sequence


def _failure(text: str) -> list[int]:
    """failure[n]: length of the longest proper prefix of text[:n] that is also its suffix, for n in 0..len(text)."""
    table = [0] * (len(text) + 1)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = table[length]
        if text[i] == text[length]:
            length += 1
        table[i + 1] = length
    return table


class StopMatcher:
    """Finds the first place where one of the stop texts ends; of several that end there, the longest counts."""

    __slots__ = ("_failures", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failures = [_failure(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)

    def __bool__(self) -> bool:
        return bool(self._stops)

    def fork(self) -> StopMatcher:
        """An independent copy at the same state."""
        copy = StopMatcher.__new__(StopMatcher)
        copy._stops, copy._failures = self._stops, self._failures
        copy._states = self._states.copy()
        return copy

    @property
    def withheld(self) -> int:
        """How many of the last characters may still be the beginning of a stop text."""
        return max(self._states, default=0)

    def feed(self, char: str) -> int:
        """Length of the stop text that `char` completes, else 0. The matcher goes on as if it had not counted."""
        found = 0
        for i, stop in enumerate(self._stops):
            state, failure = self._states[i], self._failures[i]
            while state and stop[state] != char:
                state = failure[state]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                found = max(found, state)
                state = failure[state]
            self._states[i] = state
        return found
