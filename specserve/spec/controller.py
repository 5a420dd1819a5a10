"""Controller: how many tokens to draft for each request of the next step.

It maximises expected emitted tokens a second: the sum over requests of 1 + P(first drafted token accepted) + P(second)
+ ..., over the measured cost of a step with that many rows. Drafting nothing is a normal answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.core.plan import StepPlan, StepResult
from specserve.core.request import Request
from specserve.spec.acceptance import Acceptance
from specserve.spec.cost import CostModel, StepCost

MIN_GAIN = 1.02  # expected speed-up below which nothing is drafted
WARM_UP = (1.0, 1.0, 1.0, 0.0, 0.5, 1.0, 0.0)  # shares of K in the first steps, which teach the cost of a row
EXPLORE_EVERY = 128  # steps between later looks at another size
SOON, FIRST_PROBE, LAST_PROBE = 8, 32, 512  # steps between drafts of a request for which drafting does not pay
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)


class Controller:
    """Budgets by measured acceptance and cost.

    Args:
        num_speculative_tokens: most drafted tokens a step and request (K).
        max_model_len: positions of the target's context.
        adaptive: False drafts K always, within what the request has left.
        sources: names of the drafters in order; "draft_model" costs a forward for each position.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        *,
        max_model_len: int,
        adaptive: bool = True,
        sources: Sequence[str] = ("suffix",),
    ) -> None:
        self._most = num_speculative_tokens
        self._max_model_len = max_model_len
        self._adaptive = adaptive
        self._sources = tuple(sources) or ("suffix",)
        self._step = 0
        self._probes: dict[str, tuple[int, int]] = {}  # request -> (step of its next probe, steps between)
        self.acceptance = Acceptance()
        self.cost = CostModel()

    def budgets(self, requests: Sequence[Request], other_rows: int = 0) -> list[int]:
        """Tokens to draft for each request, 0 for none.

        Args:
            requests: those that are ready to draft.
            other_rows: rows of the same step that are not theirs (prompt chunks).
        """
        limits = [self.limit(r) for r in requests]
        if not self._adaptive or not any(limits):
            return limits
        self._step += 1
        if self._step <= len(WARM_UP):
            share = WARM_UP[self._step - 1]
            return [round(share * n) for n in limits]
        cost = self.cost.fit(len(requests) + other_rows)
        if cost is None:
            return limits if self._step % 2 else [0] * len(limits)
        if self._step % EXPLORE_EVERY == 0:
            share = WARM_UP[self._step // EXPLORE_EVERY % len(WARM_UP)]
            return [round(share * n) for n in limits]
        budgets = self._best(requests, limits, cost, other_rows)
        self._probe(requests, limits, budgets)
        return budgets

    def limit(self, request: Request) -> int:
        """min(K, the request's own cap, what max_tokens leaves after the sampled token, what the context leaves)."""
        cap = request.params.draft_cap()
        left = self._max_model_len - request.num_tokens - 1
        if request.params.max_tokens is not None:
            left = min(left, request.params.max_tokens - request.num_output_tokens - 1)
        return max(min(self._most, left, self._most if cap is None else cap), 0)

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learn from a step: what was accepted, and what the whole step (drafting included) took in seconds."""
        depth = 0
        for scheduled, output in zip(plan.requests, result.outputs, strict=True):
            sources = scheduled.draft.sources[: output.num_drafted]
            self.acceptance.observe(output.request_id, sources, output.num_accepted, len(output.token_ids))
            depth = max(depth, sum(source == "draft_model" for source in sources))
            if sources and output.request_id in self._probes:
                self._reschedule(output.request_id, accepted=output.num_accepted == len(sources))
        self.cost.observe(plan.num_rows, depth, seconds)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended."""
        self._probes.pop(request_id, None)
        self.acceptance.forget(request_id)

    def _best(self, requests: Sequence[Request], limits: list[int], cost: StepCost, other_rows: int) -> list[int]:
        most = max(limits)
        gains = np.zeros((len(requests), most))
        for i, (request, limit) in enumerate(zip(requests, limits, strict=True)):
            gains[i, :limit] = self.acceptance.gains(request.request_id, self._sources[0], limit)
        emitted = float(len(requests))
        rows = len(requests) + other_rows
        best, threshold, depth_limit = MIN_GAIN * emitted / cost.seconds(rows), np.inf, 0
        for depth in self._depths(most):
            # Gains fall along a request, so the most valuable k of all of them are a prefix of each request's draft.
            ordered = np.sort(gains[:, :depth], axis=None)[::-1]
            ordered = ordered[ordered > 0]
            added = np.arange(1, len(ordered) + 1)
            paid = depth if "draft_model" in self._sources else 0
            speed = (emitted + np.cumsum(ordered)) / (cost.seconds(rows, paid) + cost.per_row * added)
            at = int(np.argmax(speed)) if len(speed) else 0
            if len(speed) and speed[at] > best:
                best, threshold, depth_limit = float(speed[at]), float(ordered[at]), depth
        return [int(n) for n in (gains[:, :depth_limit] >= threshold).sum(axis=1)]

    def _depths(self, most: int) -> Sequence[int]:
        if "draft_model" not in self._sources:
            return (most,)
        return [d for d in DEPTHS if d < most] + [most]

    def _probe(self, requests: Sequence[Request], limits: list[int], budgets: list[int]) -> None:
        """Let a few requests that draft nothing try again, so that a budget of 0 is never for ever."""
        allowed = max(1, len(requests) // 16)
        for i, request in enumerate(requests):
            if budgets[i] > 0:
                self._probes.pop(request.request_id, None)
            elif limits[i] > 0:
                due, interval = self._probes.setdefault(request.request_id, (self._step + FIRST_PROBE, FIRST_PROBE))
                if due <= self._step and allowed > 0:
                    allowed -= 1
                    budgets[i] = 1
                    self._probes[request.request_id] = (self._step + interval, interval)

    def _reschedule(self, request_id: str, *, accepted: bool) -> None:
        """After a probe that was accepted whole the next one comes sooner, else later."""
        _, interval = self._probes[request_id]
        interval = max(interval // 2, SOON) if accepted else min(4 * interval, LAST_PROBE)
        self._probes[request_id] = (self._step + interval, interval)
