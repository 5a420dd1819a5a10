"""Counters under the names that people know. Keys are Prometheus' own: name, or name{label="value"}."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping

from specserve.core.messages import Usage
from specserve.core.tree import TokenTree


def key(name: str, **labels: str | int) -> str:
    """`name{a="x",b="y"}`; labels in the given order."""
    if not labels:
        return name
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


@functools.cache
def _phase_key(phase: str) -> str:
    return key("engine_phase_seconds_total", phase=phase)


class Metrics:
    """Counters of one engine. They only grow, except gauges, which are set."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, value: float = 1, **labels: str | int) -> None:
        self._values[key(name, **labels)] += value

    def set(self, name: str, value: float, **labels: str | int) -> None:
        self._values[key(name, **labels)] = value

    def draft(self, draft: TokenTree, accepted: int) -> None:
        """One verified draft of one request, of which the first `accepted` tokens were accepted."""
        if not draft:
            return
        self.add("spec_decode_num_drafts_total", source=draft.sources[0])
        for position, source in enumerate(draft.sources):
            self.add("spec_decode_num_draft_tokens_total", source=source)
            if position < accepted:
                self.add("spec_decode_num_accepted_tokens_total", source=source)
                self.add("spec_decode_num_accepted_tokens_per_pos_total", position=position, source=source)

    def step(self, timings: Mapping[str, float], seconds: float) -> None:
        """One step and where its seconds went."""
        self.add("engine_steps_total")
        self.add("engine_step_seconds_total", seconds)
        for phase, value in timings.items():
            self._values[_phase_key(phase)] += value

    def finished(self, reason: str, usage: Usage) -> None:
        self.add("request_success_total", finished_reason=reason)
        self._tokens(usage)

    def failed(self, code: str, usage: Usage) -> None:
        self.add("request_failure_total", code=code)
        self._tokens(usage)

    def _tokens(self, usage: Usage) -> None:
        self.add("prompt_tokens_total", usage.prompt_tokens)
        self.add("generation_tokens_total", usage.completion_tokens)

    def snapshot(self) -> dict[str, float]:
        return dict(self._values)
