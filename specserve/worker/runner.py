"""ModelRunner: one model with its paged KV cache."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from specserve.core.plan import BlockCopy, BlockSwap, StepPlan
from specserve.models.batch import ForwardBatch
from specserve.models.info import ModelInfo
from specserve.models.kv_cache import PagedKVCache
from specserve.worker.host import HostBlocks
from specserve.worker.inputs import BatchBuilder, Rows
from specserve.worker.sampler import Logits, best

if TYPE_CHECKING:
    import torch

MEASURED_BYTES = 4 * 2**20  # moved at a time to measure what a swap costs


class Model(Protocol):
    """What every model of specserve.models is.

    One may also have forward_best(batch, cache, vocab_size) -> list[int], one of each of batch.logit_rows: the ids of
    the largest logits below vocab_size, the lowest of equal ones, NO_TOKEN (-1) where that logit is not finite;
    forward_draw(batch, cache, vocab_size, rows) -> (list[int], logits), the ids that `sample_rows` gives of these rows;
    and forward_host, forward's logits as an array.
    """

    @property
    def info(self) -> ModelInfo: ...

    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """float32 [len(batch.logit_rows), info.vocab_size]; K and V of all rows are in the cache after it."""


class ModelRunner:
    """Moves KV blocks and runs forwards.

    Args:
        pool: "target" or "draft": which of a plan's moves are this cache's.
        num_host_blocks: of host memory for swapped KV.
    """

    def __init__(self, model: Model, cache: PagedKVCache, *, pool: str = "target", num_host_blocks: int = 0) -> None:
        self.model = model
        self.cache = cache
        self.pool = pool
        self.host = HostBlocks(cache, num_host_blocks)
        self._builder = BatchBuilder(cache.block_size)

    @property
    def info(self) -> ModelInfo:
        return self.model.info

    def move(self, plan: StepPlan) -> float:
        """The plan's KV moves of this pool: swaps out, swaps in, copies.

        Returns:
            Seconds that the swaps took; 0.0 where there are none.
        """
        seconds = 0.0
        if plan.swap_out or plan.swap_in:
            begin = time.perf_counter()
            self.host.swap_out(self._pairs(plan.swap_out))
            self.host.swap_in(self._pairs(plan.swap_in))
            seconds = time.perf_counter() - begin
        self.copy(plan.copies)
        return seconds

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks of this pool."""
        pairs = [(c.src, c.dst) for c in copies if c.pool == self.pool]
        if pairs:
            self.cache.copy_blocks(pairs)

    def forward(self, items: Sequence[Rows], num_logits: Sequence[int]) -> Logits:
        """Logits of the last num_logits[i] rows of each item, float32 [sum, width]."""
        forward = getattr(self.model, "forward_host", self.model.forward)
        logits: Logits = forward(self._builder.build(items, num_logits), self.cache)
        return logits

    def best(self, items: Sequence[Rows], num_logits: Sequence[int], vocab_size: int) -> list[int]:
        """Greedy tokens of the same rows, without their logits where the model can do without.

        The lowest id among equals; NO_TOKEN where the largest logit is not finite. Ids from vocab_size on are padding.
        """
        batch = self._builder.build(items, num_logits)
        forward_best = getattr(self.model, "forward_best", None)
        if forward_best is not None:
            found: list[int] = forward_best(batch, self.cache, vocab_size)
            return found
        return best(self.model.forward(batch, self.cache)[:, :vocab_size])

    @property
    def draws(self) -> bool:
        """Whether the model can `draw`."""
        return hasattr(self.model, "forward_draw")

    def draw(
        self, items: Sequence[Rows], num_logits: Sequence[int], vocab_size: int, rows: bytes
    ) -> tuple[list[int], Logits]:
        """Tokens of the same rows drawn in the forward itself, and their logits, which last until the next forward.

        Args:
            rows: packed rows as `sample_rows` has them, without pointers to logits.
        """
        batch = self._builder.build(items, num_logits)
        drawn: tuple[list[int], Logits] = self.model.forward_draw(batch, self.cache, vocab_size, rows)  # type: ignore[attr-defined]
        return drawn

    def measure_swap(self) -> float:
        """Seconds to move one block one way; infinite without host memory. Call it while no plan is being run.

        A few blocks go out to memory of their own and come back, so cache and host slots are as they were.
        """
        if self.host.num_blocks == 0:
            return math.inf
        size = self.cache.nbytes // self.cache.num_blocks
        count = max(1, min(MEASURED_BYTES // size, self.cache.num_blocks))
        scratch = HostBlocks(self.cache, count)
        pairs = [(i, i) for i in range(count)]
        taken = []
        for _ in range(3):
            begin = time.perf_counter()
            scratch.swap_out(pairs)
            scratch.swap_in(pairs)
            taken.append(time.perf_counter() - begin)
        return sorted(taken)[1] / (2 * count)  # the first touches new pages; a hiccup does not count either

    def close(self) -> None:
        """Give the host memory back."""
        self.host.close()

    def _pairs(self, swaps: Sequence[BlockSwap]) -> list[tuple[int, int]]:
        return [(s.device, s.host) for s in swaps if s.pool == self.pool]
