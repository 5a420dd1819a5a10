"""Registry: the live requests, and the events that tell their owners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from specserve.core.messages import DeltaEvent, Event, FinishedEvent, GenerateCommand, QueuedEvent, StartedEvent
from specserve.engine.faults import failed_event, log_fault
from specserve.engine.judge import Release
from specserve.engine.live import LiveRequest, TokenBytes, position_logprobs
from specserve.engine.metrics import Metrics

logger = logging.getLogger(__name__)


class Registry(Mapping[str, LiveRequest]):
    """Requests between their command and their terminal event, by id. Whoever leaves gets exactly one such event.

    Args:
        drop: called as a request leaves, to free what others keep of it.
        numerics: reported with each answer.

    Attributes:
        events: not fetched yet.
    """

    def __init__(
        self, metrics: Metrics, token_bytes: TokenBytes, numerics: str, drop: Callable[[LiveRequest], None]
    ) -> None:
        self.events: list[Event] = []
        self._metrics = metrics
        self._token_bytes = token_bytes
        self._numerics = numerics
        self._drop = drop
        self._live: dict[str, LiveRequest] = {}

    def __getitem__(self, request_id: str) -> LiveRequest:
        return self._live[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def fetch(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def add(self, live: LiveRequest) -> None:
        self._live[live.request_id] = live

    def queued(self, live: LiveRequest) -> None:
        """The request waits; said once."""
        if not live.queued:
            live.queued = True
            self.events.append(QueuedEvent(live.request_id))

    def started(self, live: LiveRequest) -> None:
        """The request runs for the first time."""
        live.started = True
        request = live.request
        self._metrics.add("prefix_cache_queries_total", request.num_prompt_tokens)
        self._metrics.add("prefix_cache_hits_total", request.num_cached)
        self.events.append(
            StartedEvent(request.request_id, request.seed, request.num_prompt_tokens, request.num_cached)
        )

    def end_early(self, live: LiveRequest, reason: str) -> None:
        """End an answer between two steps: what was held back is shown first."""
        self._emit(live, live.judge.flush())
        self.finish(live, reason)

    def finish(self, live: LiveRequest, reason: str) -> None:
        self.remove(live)
        usage = live.usage()
        self._metrics.finished(reason, usage)
        self.events.append(FinishedEvent(live.request_id, reason, usage, live.request.seed, self._numerics))

    def fail(self, live: LiveRequest, error: BaseException) -> None:
        self.remove(live)
        log_fault(logger, "a request failed", error)
        event = failed_event(live.request_id, error, live.usage())
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
        self._live.pop(live.request_id, None)
        self._drop(live)

    def _emit(self, live: LiveRequest, release: Release) -> None:
        if release.token_ids or release.text:
            logprobs = position_logprobs(release, self._token_bytes)
            self.events.append(DeltaEvent(live.request_id, release.token_ids, release.text, logprobs))
