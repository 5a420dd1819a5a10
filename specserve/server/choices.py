"""Choice: what the events of one request say of one of its answers, as chat completions and completions show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specserve.core.messages import ChoiceFinishedEvent, DeltaEvent, FinishedEvent, PositionLogprobs


@dataclass(slots=True)
class Choice:
    """One answer while it grows.

    Attributes:
        last: `finish_reason` and the extensions `seed` and, where choices are ranked, `score`; without a reason while
            it runs, and for ever when the request was cancelled or failed.
    """

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=lambda: {"finish_reason": None})

    def add(self, event: DeltaEvent) -> None:
        self.text.append(event.text)
        self.logprobs.extend(event.logprobs)

    def finish(self, event: ChoiceFinishedEvent | FinishedEvent) -> bool:
        """Whether it came to an end of its own: a cancelled one did not."""
        if event.finish_reason not in ("stop", "length"):
            return False
        self.last = {"finish_reason": event.finish_reason, "seed": event.seed}
        if isinstance(event, ChoiceFinishedEvent):
            self.last["score"] = event.score
        return True


class Choices:
    """The choices of one request. They begin in the order of their indices, which the official clients count on."""

    def __init__(self) -> None:
        self._choices: list[Choice] = []

    def __getitem__(self, index: int) -> Choice:
        return self._choices[index]

    def begin(self, index: int) -> list[Choice]:
        """The choices up to `index` that had not begun; they have now."""
        new = [Choice(i) for i in range(len(self._choices), index + 1)]
        self._choices += new
        return new

    def all(self) -> list[Choice]:
        """Those that have begun, by index."""
        return list(self._choices)
