"""Where a draft must end: at the first token that the grammar refuses, and after an end token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specserve.core.protocols import Matcher
from specserve.core.request import Request


def legal_prefix(matcher: Matcher | None, tokens: Sequence[int]) -> list[int]:
    """The tokens before the first one that the matcher refuses. The matcher is left as it was."""
    if matcher is None:
        return list(tokens)
    accepted = 0
    try:
        for token in tokens:
            if matcher.terminated or not matcher.accept(token):
                break
            accepted += 1
    finally:
        if accepted:
            matcher.rollback(accepted)
    return list(tokens[:accepted])


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
