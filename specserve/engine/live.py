"""What the engine keeps of a request beside the scheduler's part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specserve.core.messages import Logprob, PositionLogprobs, SpeculationStep, Usage
from specserve.core.plan import TokenLogprobs
from specserve.core.protocols import Matcher
from specserve.core.request import Request
from specserve.core.tree import TokenTree
from specserve.engine.judge import Judge, Release

if TYPE_CHECKING:
    from specserve.engine.beams import BeamGroup
    from specserve.engine.group import Group

TokenBytes = Callable[[int], bytes]


@dataclass(slots=True)
class LiveRequest:
    """One request between its command and its terminal event.

    Attributes:
        epoch: the request's when last seen; a change tells that it was preempted.
        queued, started: the event was sent.
        drafted, accepted: draft tokens by source.
        group: the request of several sequences that this one is of; None for a request of one.
        beam: the same, where it is a beam search.
    """

    request: Request
    judge: Judge
    report_speculation: bool = False
    epoch: int = 0
    queued: bool = False
    started: bool = False
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    group: Group | None = None
    beam: BeamGroup | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def matcher(self) -> Matcher | None:
        return self.judge.matcher

    def count_draft(self, draft: TokenTree, accepted: int) -> None:
        for i, source in enumerate(draft.sources):
            self.drafted[source] = self.drafted.get(source, 0) + 1
            self.accepted[source] = self.accepted.get(source, 0) + (i < accepted)

    def usage(self) -> Usage:
        drafted, accepted = sum(self.drafted.values()), sum(self.accepted.values())
        return Usage(
            prompt_tokens=self.request.num_prompt_tokens,
            completion_tokens=self.judge.num_tokens,
            cached_tokens=self.request.num_cached,
            drafted=drafted,
            accepted=accepted,
            rejected=drafted - accepted,
            by_source={source: (count, self.accepted[source]) for source, count in self.drafted.items()},
        )


def token_text(token_bytes: TokenBytes, token_id: int) -> str:
    """A token's text by itself; part of a character shows as U+FFFD."""
    return token_bytes(token_id).decode("utf-8", errors="replace")


def position_logprobs(release: Release, token_bytes: TokenBytes) -> tuple[PositionLogprobs, ...]:
    """The released log probabilities with texts."""

    def entry(token_id: int, logprob: float | None) -> Logprob:
        return Logprob(token_id, token_text(token_bytes, token_id), logprob)

    def position(found: TokenLogprobs) -> PositionLogprobs:
        top = tuple(entry(t, p) for t, p in zip(found.top_ids, found.top_logprobs, strict=True))
        return PositionLogprobs(entry(found.token_id, found.logprob), top)

    return tuple(position(found) for found in release.logprobs)


def speculation_step(draft: TokenTree, accepted: int, token_bytes: TokenBytes) -> SpeculationStep:
    """The report of one verified draft."""
    texts = tuple(token_text(token_bytes, token) for token in draft.tokens)
    return SpeculationStep(draft.tokens, texts, draft.sources, accepted)
