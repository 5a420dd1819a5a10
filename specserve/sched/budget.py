"""TokenBudget: how many rows of prompt chunks a step may have beside decodes.

Decodes come first, and chunks fill what a latency target leaves (Sarathi-Serve, Agrawal et al. 2024, section 4). The
paper profiles the machine beforehand; here the steps that are served are the profile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

# Measured beside 8 decodes of the demo model on two cores: at 4,000 tokens of context 4 rows take as long as a step
# without them, at 16 the step is three times as long. One row takes half of what four do.
FLOOR = 4
FIRST = 32  # rows of the first chunk, of which nothing is known
AIM = 0.9  # share of the target that is aimed at; the rest is for noise
GROWTH = 1.5  # against the largest of the latest chunks: a small one says little of what a large one costs
UP = 1.5  # weight of a step that was slower than expected: the next chunk sees more context still
DOWN, DOWN_FAST = 0.125, 0.5  # of one that was faster, and of one that was far faster as was the one before
FAR = 1.5  # off by such a factor: a stall if it is one step, a change if it is two
RECENT = 8  # steps, of decodes or of chunks, that an estimate is made of
STALE = 1024  # steps with chunks in a row, after which what steps without them took is known no longer
AGED = 256  # steps after which a number of decodes that was not seen again starts afresh


class TokenBudget:
    """Rows of known tokens that a step may compute beside decodes, from what earlier steps took. Has no clock.

    Args:
        max_batched_tokens: rows of a step at most; all of them where nobody decodes.
        target_seconds: what a step with decodes and chunks may take. None keeps it within twice what steps without
            chunks take, as measured (those of all that decode or wait), and beyond as far as more wait than decode; 0
            sets no limit.
    """

    __slots__ = (
        "_alone",
        "_before",
        "_chunks",
        "_decodes",
        "_fitted",
        "_high",
        "_largest",
        "_low",
        "_most",
        "_row",
        "_since",
        "_target",
    )

    def __init__(self, max_batched_tokens: int, target_seconds: float | None) -> None:
        if max_batched_tokens < 1 or (target_seconds is not None and not 0 <= target_seconds < math.inf):
            raise ValueError(f"{max_batched_tokens} rows, target {target_seconds}: not a budget")
        self._most = max_batched_tokens
        self._target = target_seconds
        self._decodes = DecodeCost()
        self._alone: deque[float] = deque(maxlen=RECENT)  # seconds a row where nobody decoded
        # Of steps with chunks beside decodes:
        self._row: float | None = None  # seconds a row, near the slowest of late
        self._before = 0.0  # `_row` before the last step
        self._high: float | None = None  # the last step's, where it was far above
        self._low = False  # the last step's was far below
        self._largest = 0.0  # rows of the largest of late
        self._since = 0  # steps since the last one without a chunk
        self._chunks: deque[tuple[int, float]] = deque(maxlen=2 * RECENT)  # their (rows, seconds)
        self._fitted: float | None = None  # seconds at no rows, by a line through them

    @property
    def seconds_per_row(self) -> float | None:
        """Measured cost of one row of a chunk at the context of the latest chunks; None before there was one."""
        if self._row is not None:
            return self._row
        return middle(self._alone) if self._alone else None

    def rows(self, decode_rows: int, crowd: float = 0.0) -> int:
        """Rows of chunks that the next step may have, those of all its prompts together.

        Never under a small floor (or max_batched_tokens where that is less), so that a prompt always advances.

        Args:
            decode_rows: rows of requests that decode, their drafts included.
            crowd: requests that have no token yet, for each that decodes. Without a target their time counts as much:
                where many wait for few, the few are slowed down more. And what a step may take is measured by those
                with all of them: by the few alone, it would admit the slower the fewer there are.
        """
        if decode_rows <= 0 or self._target == 0:
            return self._most
        everybody = decode_rows + round(crowd * decode_rows)
        crowd = max(1.0, crowd) if self._target is None else 1.0
        base = self._base(decode_rows)
        left = None  # seconds for chunks
        if self._target is not None:
            left = AIM * self._target - (base or 0.0)
        elif base is not None:
            left = (AIM * (1.0 + crowd) * self._decodes.growth(decode_rows, everybody) - 1.0) * base
        if self._row is not None and left is not None:
            rows = min(left / self._row, crowd * GROWTH * max(self._largest, FLOOR))
        elif self._alone and left is not None:
            rows = min(left / middle(self._alone), crowd * FIRST)
        else:
            rows = crowd * FIRST
        if self._target is None and self._since % 4 == 3 and not self._fresh(decode_rows):
            # Another size, so that the part of a step that is not the chunk's can be told apart.
            rows = rows / 2 if rows >= 2 * FLOOR else 2 * FLOOR
        return min(max(int(rows), FLOOR), self._most)

    def observe(self, decode_rows: int, chunk_rows: int, seconds: float) -> None:
        """A step of `decode_rows` rows of decodes and drafts, and of `chunk_rows` rows of chunks, took `seconds`."""
        if not 0 < seconds < math.inf:
            return
        if chunk_rows <= 0:
            if decode_rows > 0:
                self._decodes.observe(decode_rows, seconds)
                self._since = 0
                self._chunks.clear()
                self._fitted = None
        elif decode_rows <= 0:
            self._alone.append(seconds / chunk_rows)
        else:
            self._chunks.append((chunk_rows, seconds))
            self._learn(decode_rows, chunk_rows, seconds)
            self._largest = max(float(chunk_rows), self._largest * (1 - DOWN))
            self._since += 1
            if not self._fresh(decode_rows):
                self._fitted = intercept(self._chunks) or self._fitted

    def _learn(self, decode_rows: int, chunk_rows: int, seconds: float) -> None:
        """Move the cost of a row: up at once, down slowly; a step that is far off counts little until a second one."""
        base = self._base(decode_rows) or 0.0
        row = max(seconds - base, 0.02 * seconds) / chunk_rows
        if self._row is None:
            self._row = row
            return
        # The fewer of the rows that were allowed it had, the less is known from it.
        weight = min(1.0, chunk_rows / self.rows(decode_rows))
        if self._high is not None and row <= FAR * self._before:
            self._row = self._before  # the last one was a stall
        known = self._row
        high = row if row > FAR * known else None
        low = row * FAR < known
        if row > known:
            # Of two in a row that are far above, the lower is certain.
            row = min(row, max(FAR * known, self._high or 0.0))
            weight *= UP
        else:
            weight *= DOWN_FAST if low and self._low else DOWN
        self._high, self._low, self._before = high, low, known
        self._row = known + weight * (row - known)

    def _fresh(self, decode_rows: int) -> bool:
        """Steps without chunks tell what those decodes take."""
        return self._since < STALE and self._decodes.covers(decode_rows)

    def _base(self, decode_rows: int) -> float | None:
        """Seconds of a step with so many decodes and no chunk; no more than steps with one took since then."""
        base = self._decodes.seconds(decode_rows)
        # With a target of its own the sum is kept whatever is taken for the base, which then need only be steady.
        if self._target is None and self._fitted is not None and not self._fresh(decode_rows):
            base = self._fitted
        if base is None or not self._chunks:
            return base
        return min(base, min(seconds for _, seconds in self._chunks))


class DecodeCost:
    """Seconds of steps that only decode, by their number of decodes. Follows the latest; a stall moves nothing."""

    __slots__ = ("_cells", "_most", "_step")

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._most = 0
        self._step = 0

    def observe(self, decode_rows: int, seconds: float) -> None:
        self._step += 1
        self._most = max(self._most, decode_rows)
        cell = self._cells.get(key := _bucket(decode_rows))
        if cell is None or self._step - cell.seen > AGED:
            cell = self._cells[key] = _Cell()
        cell.add(decode_rows, seconds, self._step)

    def covers(self, decode_rows: int) -> bool:
        """It was measured, or something near it."""
        return decode_rows <= 2 * self._most

    def growth(self, decode_rows: int, more: int) -> float:
        """How many times as long a step with `more` decodes takes, as far as that is known; never less than 1."""
        one, other = self.seconds(decode_rows), self.seconds(more)
        return max(1.0, other / one) if one and other else 1.0

    def seconds(self, decode_rows: int) -> float | None:
        """Measured, or between the nearest that were; the nearest alone beyond them. None before any step."""
        key = _bucket(decode_rows)
        exact = self._cells.get(key)
        if exact is not None:
            return exact.seconds
        below = max((k for k in self._cells if k < key), default=None)
        above = min((k for k in self._cells if k > key), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            return None if nearest is None else self._cells[nearest].seconds
        low, high = self._cells[below], self._cells[above]
        share = (decode_rows - low.decoding) / (high.decoding - low.decoding)
        return low.seconds + share * (high.seconds - low.seconds)


class _Cell:
    """The latest steps with about the same number of decodes."""

    __slots__ = ("_recent", "decoding", "seconds", "seen")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.decoding = 0
        self.seconds = 0.0
        self.seen = 0

    def add(self, decoding: int, seconds: float, step: int) -> None:
        self._recent.append(seconds)
        self.decoding = decoding
        self.seconds = middle(self._recent)
        self.seen = step


def middle(values: Sequence[float]) -> float:
    """The average of the middle half."""
    ordered = sorted(values)
    cut = (len(ordered) + 1) // 4
    kept = ordered[cut : len(ordered) - cut] or ordered
    return sum(kept) / len(kept)


def intercept(steps: Sequence[tuple[int, float]]) -> float | None:
    """Seconds at no rows of a line through (rows, seconds); None where the sizes are too much alike to tell.

    Through the middles of the small and of the large ones, so that a stall moves it little.
    """
    edge = 0.75 * max([rows for rows, _ in steps], default=0)
    small = [step for step in steps if step[0] <= edge]
    large = [step for step in steps if step[0] > edge]
    if min(len(small), len(large)) < 3:
        return None
    rows_small, rows_large = middle([s[0] for s in small]), middle([s[0] for s in large])
    seconds_small, seconds_large = middle([s[1] for s in small]), middle([s[1] for s in large])
    slope = max((seconds_large - seconds_small) / (rows_large - rows_small), 0.0)
    return max(seconds_small - slope * rows_small, 0.25 * seconds_small)


def _bucket(decode_rows: int) -> int:
    """Exact up to 8 decodes, then steps of a quarter octave."""
    return decode_rows if decode_rows <= 8 else 8 + math.ceil(4 * math.log2(decode_rows / 8))
