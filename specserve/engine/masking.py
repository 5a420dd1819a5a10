"""Grammar masks of a step: one row for each position that is sampled. Filled while the model's forward runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from specserve.core.plan import StepPlan
from specserve.core.protocols import Bitmask
from specserve.engine.live import LiveRequest
from specserve.guided.masks import allocate, fill_chain

Masks = tuple[dict[str, Bitmask], dict[str, Exception]]
# Seconds of filling from which another thread is worth its two switches (about 50 us each with the interpreter's lock).
WORTH = 150e-6


def fill_masks(plan: StepPlan, lives: Mapping[str, LiveRequest], logits_size: int) -> Masks:
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


class MaskFiller:
    """Fills a step's masks beside its forward: in a thread of its own where they are expected to take long enough.

    Between `begin` and `finish` nobody else touches the requests or their grammar states.
    """

    def __init__(self, logits_size: int) -> None:
        self._logits_size = logits_size
        self._expected = 0.0  # seconds, by the last fill
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[Masks] | None = None

    def begin(self, plan: StepPlan, lives: Mapping[str, LiveRequest]) -> None:
        """The plan's forward is about to run."""
        if self._expected < WORTH:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks")
        self._running = self._thread.submit(self._fill, plan, lives)

    def finish(self, plan: StepPlan, lives: Mapping[str, LiveRequest]) -> Masks:
        """What fill_masks gives; the forward is over."""
        running, self._running = self._running, None
        return running.result() if running is not None else self._fill(plan, lives)

    def drop(self) -> None:
        """The forward failed: wait until nobody works on the plan."""
        running, self._running = self._running, None
        if running is not None:
            wait((running,))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _fill(self, plan: StepPlan, lives: Mapping[str, LiveRequest]) -> Masks:
        begin = time.thread_time()  # beside a forward the clock on the wall tells of that too
        found = fill_masks(plan, lives, self._logits_size)
        self._expected = time.thread_time() - begin
        return found
