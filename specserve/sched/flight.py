"""Flight: the plan that is being run, and what must wait for its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.core.plan import SampledTokens, ScheduledRequest, StepPlan
from specserve.core.request import Request
from specserve.kv.manager import KVManager, SequenceKV


@dataclass(slots=True)
class Flight:
    """One plan between `schedule` and `commit`.

    Attributes:
        planned: its requests, in its order.
        deferred: KV of requests that ended meanwhile.
        decode_rows, chunk_rows, num_moved: rows of requests that decode and of their drafts, rows of known tokens
            beside these, blocks swapped.
    """

    plan: StepPlan
    planned: Sequence[Request]
    decode_rows: int = 0
    chunk_rows: int = 0
    num_moved: int = 0
    deferred: list[SequenceKV] = field(default_factory=list)

    def holds(self, request: Request) -> bool:
        return any(planned is request for planned in self.planned)


def advance(request: Request, entry: ScheduledRequest, output: SampledTokens, kv: KVManager) -> None:
    """Take over what the step computed and emitted for a request."""
    emitted = output.token_ids
    accepted = min(output.num_accepted, len(emitted))
    request.append(emitted)
    kv.commit(request.kv, request.token_ids, len(entry.token_ids) - len(entry.draft) + accepted)
    request.num_computed = request.kv.target.committed


def check_output(entry: ScheduledRequest, output: SampledTokens | None) -> None:
    """Raises ValueError for an output that cannot come from the plan's entry."""
    if output is None or output.epoch != entry.epoch:
        return
    if len(output.token_ids) > entry.num_logits or output.num_accepted > len(entry.draft):
        raise ValueError(
            f"request {entry.request_id}: {len(output.token_ids)} tokens, {output.num_accepted} accepted from "
            f"{entry.num_logits} sampled rows and {len(entry.draft)} drafted"
        )
