"""BeamGroup: the beams of one search in the engine. Each has forked KV and a grammar state of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specserve.core.errors import InvalidRequestError
from specserve.core.messages import (
    ChoiceFinishedEvent,
    DeltaEvent,
    Event,
    FinishedEvent,
    ProgressEvent,
    QueuedEvent,
    StartedEvent,
    Usage,
)
from specserve.core.plan import SampledTokens, ScheduledRequest, TokenLogprobs
from specserve.core.request import Request
from specserve.core.tree import TokenTree
from specserve.engine.beam_search import Continuation, Finished, Outcome, choose, continuations
from specserve.engine.group import member_id, total
from specserve.engine.judge import Judge, Release
from specserve.engine.live import LiveRequest, TokenBytes, position_logprobs
from specserve.sched.scheduler import Scheduler

_NOTHING = TokenLogprobs(-1, None)


@dataclass(frozen=True, slots=True)
class Trace:
    """Output released so far, shared between beams that parted later."""

    before: Trace | None
    release: Release

    def releases(self) -> list[Release]:
        found = []
        trace: Trace | None = self
        while trace is not None:
            found.append(trace.release)
            trace = trace.before
        return found[::-1]


@dataclass(slots=True)
class _Beam:
    """One running hypothesis.

    Attributes:
        total: sum of log probabilities of its tokens.
        draft, rows: what its last step gave, until all beams have theirs; row j follows j tokens of the draft.
    """

    live: LiveRequest
    total: float = 0.0
    trace: Trace | None = None
    draft: TokenTree | None = None
    rows: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    trace: Trace
    reason: str
    num_tokens: int

    @property
    def shown(self) -> tuple[tuple[int, ...], str]:
        """Token ids and text, without what a stop text cut off."""
        parts = self.trace.releases()
        return tuple(token for part in parts for token in part.token_ids), "".join(part.text for part in parts)


@dataclass(frozen=True, slots=True)
class _Child:
    parent: _Beam
    chosen: Continuation
    judge: Judge
    trace: Trace


class BeamGroup:
    """One search. The engine gives it what its beams' steps gave; it says which beams go on, and how.

    Args:
        live: the first beam, whose judge stands at the beginning of the answer.
    """

    def __init__(self, request_id: str, live: LiveRequest, token_bytes: TokenBytes, numerics: str) -> None:
        params = live.request.params
        self.request_id = request_id
        self.lives = {live.request_id: live}
        self._params = params
        self._token_bytes = token_bytes
        self._numerics = numerics
        self._beams = {live.request_id: _Beam(live)}
        self._finished: Finished[_Hypothesis] = Finished(
            params.beams, params.length_penalty, params.early_stopping, live.judge.budget
        )
        self._children: list[_Child] = []
        self._first = live
        self._gone = Usage()  # drafts of beams that ended
        self._next_index = 1
        self._queued = self._started = False

    # What the owner is told.

    def translate(self, live: LiveRequest, event: Event) -> Sequence[Event]:
        if isinstance(event, QueuedEvent):
            told, self._queued = self._queued or self._started, True
        elif isinstance(event, StartedEvent):
            told, self._started = self._started, True
        else:
            told = not isinstance(event, ProgressEvent) or len(self._beams) > 1
        return () if told else (dataclasses.replace(event, request_id=self.request_id),)

    def ended(self, live: LiveRequest, reason: str) -> Sequence[Event]:
        """Beams end by themselves only when the whole search is cancelled."""
        self._forget(live.request_id)
        return () if self.lives else (self._end("cancelled"),)

    def usage(self) -> Usage:
        found = total([self._gone, *(live.usage() for live in self.lives.values())])
        request = self._first.request
        lengths = [hypothesis.num_tokens for _, hypothesis in self._best()]
        reached = max((live.judge.num_tokens for live in self.lives.values()), default=0)
        return dataclasses.replace(
            found,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.num_cached,
            completion_tokens=sum(lengths) or reached,
        )

    def results(self) -> list[Event]:
        """The best hypotheses, whole, and the end."""
        events: list[Event] = []
        for index, (score, hypothesis) in enumerate(self._best()):
            events.append(self._delta(index, hypothesis))
            events.append(
                ChoiceFinishedEvent(self.request_id, index, hypothesis.reason, self._first.request.seed, score)
            )
        reasons = {hypothesis.reason for _, hypothesis in self._best()}
        return [*events, self._end("length" if "length" in reasons else "stop")]

    def _best(self) -> list[tuple[float, _Hypothesis]]:
        return list(self._finished)[: self._params.n]

    def _delta(self, index: int, hypothesis: _Hypothesis) -> DeltaEvent:
        logprobs = tuple(entry for part in hypothesis.trace.releases() for entry in part.logprobs)
        release = Release(*hypothesis.shown, logprobs)
        told = position_logprobs(release, self._token_bytes)
        return DeltaEvent(self.request_id, release.token_ids, release.text, told, index=index)

    def _end(self, reason: str) -> FinishedEvent:
        return FinishedEvent(self.request_id, reason, self.usage(), self._first.request.seed, self._numerics)

    # One step.

    @property
    def done(self) -> bool:
        """The search is over: `results` has it."""
        return self._finished.done

    def collect(self, scheduled: ScheduledRequest, output: SampledTokens) -> None:
        """What a beam's step gave."""
        beam = self._beams[output.request_id]
        # A beam after which nothing may follow ends; the others go on.
        beam.draft, beam.rows = scheduled.draft, output.candidates or (_NOTHING,)

    def resolve(self) -> dict[str, tuple[int, ...]]:
        """After all outputs of a step: choose, if every beam has its candidates.

        Returns:
            For beams that went along their drafts, the drafted tokens that hold. `apply` does the rest, once the step
            is committed.
        """
        beams = list(self._beams.values())
        if not all(beam.rows for beam in beams):
            for beam in beams:  # what was drafted is rolled back before the others have theirs
                beam.rows = beam.rows[:1]
            return {}
        held: dict[str, list[int]] = {beam.live.request_id: [] for beam in beams}
        for level in range(max(len(beam.rows) for beam in beams)):
            outcome = self._choose(beams, level)
            if self.done:
                break
            drafted = self._as_drafted(beams, outcome, level)
            if drafted is None:
                self._children = [self._child(beams[chosen.beam], chosen, level) for chosen in outcome.running]
                break
            for beam, chosen in zip(beams, drafted, strict=True):
                beam.trace = Trace(beam.trace, self._judge(beam.live.judge, beam, chosen, level))
                beam.total = chosen.total
                held[beam.live.request_id].append(chosen.token)
        return {name: tuple(tokens) for name, tokens in held.items()}

    def _choose(self, beams: Sequence[_Beam], level: int) -> Outcome:
        rows = [beam.rows[level] for beam in beams]
        judges = [beam.live.judge for beam in beams]
        outcome = choose(
            continuations([beam.total for beam in beams], rows),
            self._params.beams,
            lambda beam, token: judges[beam].end_by(token),
        )
        length = judges[0].num_tokens + 1
        for chosen, reason in outcome.ended:
            child = self._child(beams[chosen.beam], chosen, level)
            ended = _Hypothesis(child.trace, reason, length)
            # What differs behind a stop text only is one answer.
            same = (lambda kept, shown=ended.shown: kept.shown == shown) if self._params.stops else None
            self._finished.add(chosen.total, length, ended, same)
        if not (outcome.running or len(self._finished)):
            raise InvalidRequestError("no token is left that the request's restrictions allow", code="no_legal_token")
        self._finished.advance(outcome.running[0].total if outcome.running else None, length)
        return outcome

    def _as_drafted(self, beams: Sequence[_Beam], outcome: Outcome, level: int) -> list[Continuation] | None:
        """The continuations in the order of `beams`, if each goes on once, along its draft, to a row that is there."""
        if len(outcome.running) != len(beams):
            return None
        found = sorted(outcome.running, key=lambda chosen: chosen.beam)
        for i, (beam, chosen) in enumerate(zip(beams, found, strict=True)):
            tokens = beam.draft.tokens if beam.draft is not None else ()
            if chosen.beam != i or level + 1 >= len(beam.rows) or chosen.token != tokens[level]:
                return None
        return found

    def _child(self, beam: _Beam, chosen: Continuation, level: int) -> _Child:
        judge = beam.live.judge.fork()
        return _Child(beam, chosen, judge, Trace(beam.trace, self._judge(judge, beam, chosen, level)))

    def _judge(self, judge: Judge, beam: _Beam, chosen: Continuation, level: int) -> Release:
        count = self._params.logprobs
        entries: tuple[TokenLogprobs, ...] = ()
        if count is not None:
            row = beam.rows[level]
            entries = (TokenLogprobs(chosen.token, chosen.logprob, row.top_ids[:count], row.top_logprobs[:count]),)
        return judge.judge((chosen.token,), entries).release

    # After the commit.

    def apply(self, scheduler: Scheduler, leave: Callable[[LiveRequest], None]) -> Iterator[LiveRequest]:
        """Carry out what `resolve` chose: end beams without a continuation, fork those with several.

        Args:
            leave: frees what is kept of a beam that ends.

        Yields:
            The new beams.
        """
        children, self._children = self._children, []
        if not children:
            return
        kept = {child.parent.live.request_id for child in children}
        for name in [name for name in self._beams if name not in kept]:
            leave(self._forget(name))
        first: dict[str, _Child] = {}
        for child in children:
            name = child.parent.live.request_id
            if name not in first:
                first[name] = child
                continue
            live = self._fork(child, scheduler)
            self._beams[live.request_id] = _Beam(live, child.chosen.total, child.trace)
            yield live
        for name, child in first.items():
            beam = self._beams[name]
            beam.live.judge = child.judge
            beam.live.request.append((child.chosen.token,))
            beam.total, beam.trace, beam.draft, beam.rows = child.chosen.total, child.trace, None, ()
            if self._params.penalises:
                scheduler.revise(beam.live.request)

    def _fork(self, child: _Child, scheduler: Scheduler) -> LiveRequest:
        parent = child.parent.live.request
        index, self._next_index = self._next_index, self._next_index + 1
        request = Request(
            member_id(self.request_id, index),
            parent.token_ids[: parent.num_prompt_tokens],
            parent.params,
            seed=parent.seed,
            namespace=parent.namespace,
            priority=parent.priority,
            arrival=parent.arrival,
            family=parent.family,
            index=index,
        )
        request.append((*parent.output_token_ids, child.chosen.token))
        scheduler.fork(parent, request)
        live = LiveRequest(request, child.judge, group=self, beam=self, started=True)
        self.lives[live.request_id] = live
        return live

    def _forget(self, name: str) -> LiveRequest:
        del self._beams[name]
        live = self.lives.pop(name)
        self._gone = total([self._gone, live.usage()])
        return live
