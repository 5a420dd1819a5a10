"""Nothing is drafted past an end token."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def cut_after_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """The tokens up to and with the first end token."""
    for i, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: i + 1])
    return list(tokens)
