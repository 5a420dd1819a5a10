"""ChoiceGroup: parallel sampling. n sequences of one prompt, each with its own seed, or the best n of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specserve.core.messages import (
    ChoiceFinishedEvent,
    DeltaEvent,
    Event,
    FinishedEvent,
    PositionLogprobs,
    ProgressEvent,
    QueuedEvent,
    StartedEvent,
    Usage,
)
from specserve.core.sampling import SamplingParams
from specserve.engine.group import total
from specserve.engine.live import LiveRequest

NEVER = -1e9  # stands for the log probability of a token that has none


@dataclasses.dataclass(slots=True)
class _Choice:
    """One sequence. `deltas` are kept only where choices are ranked before anything is shown."""

    seed: int
    usage: Usage = dataclasses.field(default_factory=Usage)
    reason: str | None = None
    deltas: list[DeltaEvent] = dataclasses.field(default_factory=list)

    def logprobs(self) -> list[PositionLogprobs]:
        return [entry for delta in self.deltas for entry in delta.logprobs]

    def score(self) -> float:
        """Mean log probability a token."""
        values = [NEVER if p.token.logprob is None else p.token.logprob for p in self.logprobs()]
        return sum(values) / len(values) if values else NEVER


class ChoiceGroup:
    """Events of n sequences under one request id.

    Args:
        params: the owner's: n, best_of and logprobs are read.
        lives: all sequences, in order of index.
    """

    def __init__(self, request_id: str, params: SamplingParams, lives: Sequence[LiveRequest], numerics: str) -> None:
        self.request_id = request_id
        self.lives = {live.request_id: live for live in lives}
        self._params = params
        self._numerics = numerics
        self._ranked = len(lives) > params.n
        self._choices = [_Choice(live.request.seed) for live in lives]
        self._queued = False
        self._started = False

    def translate(self, live: LiveRequest, event: Event) -> Sequence[Event]:
        index = live.request.index
        if isinstance(event, QueuedEvent):
            told, self._queued = self._queued or self._started, True
            return () if told else (dataclasses.replace(event, request_id=self.request_id),)
        if isinstance(event, StartedEvent):
            told, self._started = self._started, True
            seed = self._choices[0].seed
            return () if told else (dataclasses.replace(event, request_id=self.request_id, seed=seed),)
        if isinstance(event, ProgressEvent):
            # The first one computes the prompt; what a later one computes of it is its recovery from preemption.
            return () if index else (dataclasses.replace(event, request_id=self.request_id),)
        if isinstance(event, DeltaEvent):
            shown = dataclasses.replace(event, request_id=self.request_id, index=index)
            if not self._ranked:
                return (shown,)
            self._choices[index].deltas.append(shown)
        return ()

    def ended(self, live: LiveRequest, reason: str) -> Sequence[Event]:
        del self.lives[live.request_id]
        index = live.request.index
        choice = self._choices[index]
        choice.usage, choice.reason = live.usage(), reason
        events: list[Event] = []
        if not self._ranked and reason != "cancelled":
            events.append(ChoiceFinishedEvent(self.request_id, index, reason, choice.seed))
        if self.lives:
            return events
        shown = self._choices
        if any(choice.reason == "cancelled" for choice in shown):
            reason = "cancelled"
        else:
            if self._ranked:
                shown = self._best()
                events += self._ranking(shown)
            reason = "length" if any(choice.reason == "length" for choice in shown) else "stop"
        events.append(FinishedEvent(self.request_id, reason, self.usage(), self._choices[0].seed, self._numerics))
        return events

    def usage(self) -> Usage:
        running = {live.request.index: live.usage() for live in self.lives.values()}
        return total(running.get(i, choice.usage) for i, choice in enumerate(self._choices))

    def _best(self) -> list[_Choice]:
        """The n best, best first; of equal ones the first."""
        return sorted(self._choices, key=_Choice.score, reverse=True)[: self._params.n]

    def _ranking(self, best: Sequence[_Choice]) -> list[Event]:
        """The deltas of the best choices, and the end of each."""
        events: list[Event] = []
        for index, choice in enumerate(best):
            hidden = self._params.logprobs is None
            events += [
                dataclasses.replace(delta, index=index, logprobs=() if hidden else delta.logprobs)
                for delta in choice.deltas
            ]
            events.append(
                ChoiceFinishedEvent(self.request_id, index, choice.reason or "stop", choice.seed, choice.score())
            )
        return events
