"""Beam search: which continuations go on, which are finished, and when nothing can get better. No engine in here.

The rules are those of transformers' beam search, so that results agree: in each step the best `width` continuations
that do not end go on; of the best `width` of all, those that end are finished, with the score
sum of log probabilities / length ** length_penalty; the best `width` finished ones are kept.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from specserve.core.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Continuation:
    """One token after one beam. `total` is the sum of log probabilities with it."""

    beam: int
    token: int
    total: float
    logprob: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step: what goes on (best first), and what ended among the best, with why."""

    running: tuple[Continuation, ...]
    ended: tuple[tuple[Continuation, str], ...]


def continuations(totals: Sequence[float], rows: Sequence[TokenLogprobs]) -> list[Continuation]:
    """Every candidate of every beam, best first; of equal ones the earlier beam's, then the lower id."""
    found = [
        Continuation(beam, token, total + logprob, logprob)
        for beam, (total, row) in enumerate(zip(totals, rows, strict=True))
        for token, logprob in zip(row.top_ids, row.top_logprobs, strict=True)
        if logprob is not None
    ]
    found.sort(key=lambda c: (-c.total, c.beam, c.token))
    return found


def choose(candidates: Sequence[Continuation], width: int, end_by: Callable[[int, int], str | None]) -> Outcome:
    """Split one step's candidates.

    Args:
        candidates: best first.
        end_by: finish reason of (beam, token), or None.
    """
    running: list[Continuation] = []
    ended: list[tuple[Continuation, str]] = []
    for rank, candidate in enumerate(candidates):
        reason = end_by(candidate.beam, candidate.token)
        if reason is None:
            running.append(candidate)
        elif rank < width:
            ended.append((candidate, reason))
        if len(running) == width and rank + 1 >= width:
            break
    return Outcome(tuple(running), tuple(ended))


T = TypeVar("T")


class Finished(Generic[T]):
    """The best finished hypotheses, and whether running ones may still join them.

    Args:
        width: how many are kept.
        max_tokens: longest answer; what early_stopping "never" reckons with.
    """

    def __init__(self, width: int, length_penalty: float, early_stopping: bool | str, max_tokens: int) -> None:
        self._width = width
        self._penalty = length_penalty
        self._early = early_stopping
        self._max_tokens = max_tokens
        self._kept: list[tuple[float, int, T]] = []
        self._count = 0
        self.done = False

    def __iter__(self) -> Iterator[tuple[float, T]]:
        """(score, hypothesis), best first."""
        return ((-negative, item) for negative, _, item in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def full(self) -> bool:
        return len(self._kept) == self._width

    def add(self, total: float, length: int, item: T, same: Callable[[T], bool] | None = None) -> None:
        """A hypothesis of `length` tokens has ended. All that end in one step compete, with early stopping too.

        Args:
            same: whether a kept one is the same answer, of which the better is kept; None where none can be.
        """
        if same is not None:
            found = next((i for i, (_, _, kept) in enumerate(self._kept) if same(kept)), None)
            if found is not None:
                if -self._kept[found][0] >= self.score(total, length):
                    return
                del self._kept[found]
        self._count += 1
        insort(self._kept, (-self.score(total, length), self._count, item))
        del self._kept[self._width :]

    def score(self, total: float, length: int) -> float:
        return total / float(length**self._penalty)

    def advance(self, best_total: float | None, length: int) -> bool:
        """A step is over: the best running beam has `best_total` at `length` tokens (None: nothing runs).

        Returns:
            Whether the search is done.
        """
        if best_total is None or (self._early is True and self.full):
            self.done = True
        elif self.full:
            reach = self._max_tokens if self._early == "never" and self._penalty > 0 else length
            self.done = self.score(best_total, reach) <= -self._kept[-1][0]
        return self.done
