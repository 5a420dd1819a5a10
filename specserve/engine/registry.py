"""Registry: the live requests, and the events that tell their owners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from specserve.core.messages import DeltaEvent, Event, FinishedEvent, GenerateCommand, QueuedEvent, StartedEvent
from specserve.engine.faults import failed_event, log_fault
from specserve.engine.group import Group
from specserve.engine.judge import Release
from specserve.engine.live import LiveRequest, TokenBytes, position_logprobs
from specserve.engine.metrics import Metrics

logger = logging.getLogger(__name__)


class Registry(Mapping[str, LiveRequest]):
    """Requests between their command and their terminal event, by id. Whoever leaves gets exactly one such event.

    A group's members are here under their own ids; their events reach the owner through the group, under its id.

    Args:
        drop: called as a request leaves, to free what others keep of it.
        numerics: reported with each answer.

    Attributes:
        events: not fetched yet.
        num_guided: requests with a grammar.
    """

    def __init__(
        self, metrics: Metrics, token_bytes: TokenBytes, numerics: str, drop: Callable[[LiveRequest], None]
    ) -> None:
        self.events: list[Event] = []
        self.num_guided = 0
        self._metrics = metrics
        self._token_bytes = token_bytes
        self._numerics = numerics
        self._drop = drop
        self._live: dict[str, LiveRequest] = {}
        self._groups: dict[str, Group] = {}

    def __getitem__(self, request_id: str) -> LiveRequest:
        return self._live[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str, default: Any = None) -> Any:
        """Mapping's own, which catches a KeyError, takes several times as long."""
        return self._live.get(request_id, default)

    def fetch(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def add(self, lives: Iterable[LiveRequest], group: Group | None = None) -> None:
        for live in lives:
            self._live[live.request_id] = live
            self.num_guided += live.request.params.guided is not None
        if group is not None:
            self._groups[group.request_id] = group

    def taken(self, request_id: str) -> bool:
        """A request, a group or a member has this id."""
        return request_id in self._live or request_id in self._groups

    def of(self, request_id: str) -> list[LiveRequest]:
        """What lives of the owner's request."""
        group = self._groups.get(request_id)
        if group is not None:
            return list(group.lives.values())
        live = self._live.get(request_id)
        return [live] if live is not None and live.group is None else []

    def publish(self, events: Iterable[Event]) -> None:
        """Events of live requests, before any of them leaves: each reaches its owner."""
        if not self._groups:
            self.events.extend(events)
            return
        for event in events:
            live = self._live.get(event.request_id)
            if live is None or live.group is None:
                self.events.append(event)
            else:
                self.events.extend(live.group.translate(live, event))

    def queued(self, live: LiveRequest) -> None:
        """The request waits; said once."""
        if not live.queued:
            live.queued = True
            self.publish((QueuedEvent(live.request_id),))

    def started(self, live: LiveRequest) -> None:
        """The request runs for the first time."""
        live.started = True
        request = live.request
        if request.index == 0:  # the others of a family fork what it has
            self._metrics.add("prefix_cache_queries_total", request.num_prompt_tokens)
            self._metrics.add("prefix_cache_hits_total", request.num_cached)
        self.publish((StartedEvent(request.request_id, request.seed, request.num_prompt_tokens, request.num_cached),))

    def end_early(self, live: LiveRequest, reason: str) -> None:
        """End an answer between two steps: what was held back is shown first."""
        self._emit(live, live.judge.flush())
        self.finish(live, reason)

    def finish(self, live: LiveRequest, reason: str) -> None:
        self.remove(live)
        if live.group is not None:
            self._conclude(live.group.ended(live, reason))
            return
        usage = live.usage()
        self._metrics.finished(reason, usage)
        self.events.append(FinishedEvent(live.request_id, reason, usage, live.request.seed, self._numerics))

    def finish_group(self, group: Group, events: Iterable[Event]) -> None:
        """A group ends with all members that still live; the last of `events` is terminal."""
        events = list(events)
        for live in list(group.lives.values()):
            self.remove(live)
        self._conclude(events)

    def _conclude(self, events: Iterable[Event]) -> None:
        """Events of a group, which has ended if one of them is terminal."""
        for event in events:
            self.events.append(event)
            if isinstance(event, FinishedEvent):
                self._groups.pop(event.request_id, None)
                self._metrics.finished(event.finish_reason, event.usage)

    def fail(self, live: LiveRequest, error: BaseException) -> None:
        """One sequence's fault ends its whole group. A no-op for one that has left already."""
        if live.request_id not in self._live:
            return
        name, usage = live.request_id, live.usage()
        leaving = [live]
        if live.group is not None:
            name, usage, leaving = live.group.request_id, live.group.usage(), list(live.group.lives.values())
            self._groups.pop(name, None)
        for each in leaving:
            self.remove(each)
        log_fault(logger, "a request failed", error)
        event = failed_event(name, error, usage)
        self._metrics.failed(event.code, event.usage)
        self.events.append(event)

    def refuse(self, command: GenerateCommand, error: Exception) -> None:
        """A request that never became live."""
        log_fault(logger, "a request was refused", error)
        event = failed_event(command.request_id, error)
        self._metrics.failed(event.code, event.usage)
        self.events.append(event)

    def remove(self, live: LiveRequest) -> None:
        """Forget a request without an event."""
        if self._live.pop(live.request_id, None) is not None:
            self.num_guided -= live.request.params.guided is not None
        self._drop(live)

    def _emit(self, live: LiveRequest, release: Release) -> None:
        if release.token_ids or release.text:
            logprobs = position_logprobs(release, self._token_bytes)
            self.publish((DeltaEvent(live.request_id, release.token_ids, release.text, logprobs),))
