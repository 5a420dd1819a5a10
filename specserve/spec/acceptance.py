"""How often drafts are accepted: totals for reports, and decayed rates for the controller."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

DECAY = 0.98  # a step's weight falls to 1/e after 50 drafts of the source
REQUEST_DECAY = 0.9  # of one request: after 10
PRIOR_RATE = 0.7  # before anything is known
PRIOR_WEIGHT = 4.0
REQUEST_WEIGHT = 1.0
MAX_RATE = 0.99


@dataclass(slots=True)
class _Rate:
    """Decayed trials and hits."""

    trials: float = 0.0
    hits: float = 0.0

    def add(self, trials: float, hits: float, decay: float) -> None:
        self.trials = self.trials * decay + trials
        self.hits = self.hits * decay + hits


@dataclass(slots=True)
class _RequestRate:
    """Hits of one request beside those that its sources' averages predicted."""

    expected: float = 0.0
    hits: float = 0.0
    source: str = ""


@dataclass(slots=True)
class Totals:
    """Counters since the start: drafted and accepted by source and by (source, position), tokens emitted."""

    drafted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    accepted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    accepted_at: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    emitted: int = 0
    drafts: int = 0


class Acceptance:
    """Acceptance by source and position, and how much better or worse than that each request does.

    A position's rate is conditional: of the drafts whose earlier tokens all stood, how many had this one accepted.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self._rates: dict[str, list[_Rate]] = {}
        self._requests: dict[str, _RequestRate] = {}

    def observe(self, request_id: str, sources: Sequence[str], num_accepted: int, num_emitted: int) -> None:
        """One verified draft: the source of each drafted token, and how many from the start were accepted."""
        totals = self.totals
        totals.emitted += num_emitted
        if not sources:
            return
        totals.drafts += 1
        own = self._requests.setdefault(request_id, _RequestRate())
        own.source = sources[0]
        expected = 0.0
        for position, source in enumerate(sources):
            totals.drafted[source] += 1
            hit = position < num_accepted
            if hit:
                totals.accepted[source] += 1
                totals.accepted_at[source, position] += 1
            if position <= num_accepted:
                expected += self.rate(source, position)
                self._cell(source, position).add(1.0, float(hit), DECAY)
        own.expected = own.expected * REQUEST_DECAY + expected
        own.hits = own.hits * REQUEST_DECAY + num_accepted

    def rate(self, source: str, position: int) -> float:
        """Conditional acceptance of a source at a position; the position before it is the prior."""
        cells = self._rates.get(source, [])
        rate = PRIOR_RATE
        for cell in cells[: position + 1]:
            rate = (PRIOR_WEIGHT * rate + cell.hits) / (PRIOR_WEIGHT + cell.trials)
        return rate

    def gains(self, request_id: str, source: str, count: int) -> list[float]:
        """Probability that drafted token 1, 2, ... `count` of this request is accepted; falls with the position.

        Args:
            source: of a request that has not drafted yet.
        """
        own = self._requests.get(request_id)
        factor = 1.0
        if own is not None:
            factor = (REQUEST_WEIGHT + own.hits) / (REQUEST_WEIGHT + own.expected)
            source = own.source
        result = []
        product = 1.0
        for position in range(count):
            product *= min(self.rate(source, position) * factor, MAX_RATE)
            result.append(product)
        return result

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _cell(self, source: str, position: int) -> _Rate:
        cells = self._rates.setdefault(source, [])
        while len(cells) <= position:
            cells.append(_Rate())
        return cells[position]
