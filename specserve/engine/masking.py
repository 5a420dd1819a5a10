"""Grammar masks of a step: one row for each position that is sampled."""

from __future__ import annotations

from collections.abc import Mapping

from specserve.core.plan import StepPlan
from specserve.core.protocols import Bitmask
from specserve.engine.live import LiveRequest
from specserve.guided.masks import allocate, fill_chain


def fill_masks(
    plan: StepPlan, lives: Mapping[str, LiveRequest], logits_size: int
) -> tuple[dict[str, Bitmask], dict[str, Exception]]:
    """Masks of the guided requests with logits, and the requests whose grammar state failed, with the reason.

    A request that failed keeps a mask (nothing is forbidden): its rows are sampled with the others', then dropped.
    """
    masks: dict[str, Bitmask] = {}
    failed: dict[str, Exception] = {}
    for scheduled in plan.requests:
        live = lives.get(scheduled.request_id)
        if live is None or live.matcher is None or scheduled.num_logits == 0:
            continue
        mask = allocate(scheduled.num_logits, logits_size)
        try:
            fill_chain(live.matcher, scheduled.draft.tokens, mask)
        except Exception as error:
            mask[:] = -1
            failed[scheduled.request_id] = error
        masks[scheduled.request_id] = mask
    return masks, failed
