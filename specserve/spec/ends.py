"""Nothing is drafted past an end token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specserve.core.request import Request


def end_ids(request: Request, eos_ids: Collection[int]) -> frozenset[int]:
    """Ids that end this request's answer; nothing is drafted past one of them."""
    own = request.params.stop_token_ids
    return frozenset(own) if request.params.ignore_eos else frozenset(own).union(eos_ids)


def cut_after_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """The tokens up to and with the first end token."""
    for i, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: i + 1])
    return list(tokens)
