"""Groups: a request of several sequences as its owner sees it, under one id and with one end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from specserve.core.messages import Event, Usage
from specserve.engine.live import LiveRequest


class Group(Protocol):
    """What the registry asks of a group.

    Attributes:
        request_id: the owner's.
        lives: members that have not ended, by their own ids.
    """

    request_id: str
    lives: dict[str, LiveRequest]

    def translate(self, live: LiveRequest, event: Event) -> Sequence[Event]:
        """What the owner is told of a member's queued, started, progress or delta event."""

    def ended(self, live: LiveRequest, reason: str) -> Sequence[Event]:
        """A member ended by itself or was cancelled; the group's own end comes with its last one."""

    def usage(self) -> Usage:
        """Of the whole request so far."""


def member_id(request_id: str, index: int) -> str:
    """Id of one sequence of a request of several."""
    return f"{request_id}#{index}"


def total(usages: Iterable[Usage]) -> Usage:
    """Usage of sequences with one prompt: it is counted once, and of cached tokens the first sequence's."""
    parts = list(usages)
    by_source: dict[str, tuple[int, int]] = {}
    for part in parts:
        for source, (drafted, accepted) in part.by_source.items():
            before = by_source.get(source, (0, 0))
            by_source[source] = (before[0] + drafted, before[1] + accepted)
    return Usage(
        prompt_tokens=parts[0].prompt_tokens,
        completion_tokens=sum(part.completion_tokens for part in parts),
        cached_tokens=parts[0].cached_tokens,
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        rejected=sum(part.rejected for part in parts),
        by_source=by_source,
    )
