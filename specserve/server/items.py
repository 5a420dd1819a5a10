"""OutputItem: one message of a response, and the events that tell of it, without what all events have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.core.messages import DeltaEvent
from specserve.server import events

Content = tuple[str, dict[str, Any]]  # the type of an event, and its own fields


class OutputItem:
    """The text of one choice; its place in the response's output is the choice's index."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.done = False
        self.token_ids: list[int] = []
        self._id = events.new_id("msg")
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._status = "in_progress"
        self._extensions: dict[str, Any] = {}

    def added(self) -> list[Content]:
        """Before the first delta."""
        item = {**self.object(), "content": []}
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            ("response.output_item.added", {"output_index": self.index, "item": item}),
            ("response.content_part.added", {**self._place(), "part": empty}),
        ]

    def delta(self, event: DeltaEvent) -> Content:
        logprobs = events.logprob_objects(event.logprobs)
        self._text.append(event.text)
        self.token_ids.extend(event.token_ids)
        self._logprobs.extend(logprobs)
        content = {"delta": event.text, "logprobs": logprobs, "token_ids": list(event.token_ids)}
        return "response.output_text.delta", {**self._place(), **content}

    def close(self, status: str, extensions: Mapping[str, Any] | None = None) -> list[Content]:
        """Nothing comes after it. `extensions` are further fields of the item."""
        if self.done:
            return []
        self.done, self._status = True, status
        self._extensions = dict(extensions or {})
        item = self.object()
        part = item["content"][0]
        return [
            ("response.output_text.done", {**self._place(), "text": part["text"], "logprobs": part["logprobs"]}),
            ("response.content_part.done", {**self._place(), "part": part}),
            ("response.output_item.done", {"output_index": self.index, "item": item}),
        ]

    def object(self) -> dict[str, Any]:
        """The item as it is now."""
        part = {
            "type": "output_text",
            "text": "".join(self._text),
            "annotations": [],
            "logprobs": self._logprobs,
            "token_ids": self.token_ids,
        }
        return {
            "id": self._id,
            "type": "message",
            "status": self._status,
            "role": "assistant",
            "content": [part],
            **self._extensions,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self.index, "content_index": 0}
