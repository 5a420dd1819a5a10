"""ModelRunner: one model with its paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from specserve.core.plan import BlockCopy, BlockSwap, StepPlan
from specserve.models.batch import ForwardBatch
from specserve.models.info import ModelInfo
from specserve.models.kv_cache import PagedKVCache
from specserve.worker.inputs import Rows, build_batch


class Model(Protocol):
    """What every model of specserve.models is."""

    @property
    def info(self) -> ModelInfo: ...

    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """float32 [len(batch.logit_rows), info.vocab_size]; K and V of all rows are in the cache after it."""


class ModelRunner:
    """Moves KV blocks and runs forwards.

    Args:
        pool: "target" or "draft": which of a plan's moves are this cache's.
    """

    def __init__(self, model: Model, cache: PagedKVCache, *, pool: str = "target") -> None:
        self.model = model
        self.cache = cache
        self.pool = pool
        self._host: dict[int, torch.Tensor] = {}

    @property
    def info(self) -> ModelInfo:
        return self.model.info

    @torch.inference_mode()
    def move(self, plan: StepPlan) -> None:
        """The plan's KV moves of this pool: swaps out, swaps in, copies."""
        self._swap_out(s for s in plan.swap_out if s.pool == self.pool)
        self._swap_in(s for s in plan.swap_in if s.pool == self.pool)
        self.copy(plan.copies)

    @torch.inference_mode()
    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks of this pool."""
        pairs = [(c.src, c.dst) for c in copies if c.pool == self.pool]
        if pairs:
            self.cache.copy_blocks(pairs)

    @torch.inference_mode()
    def forward(self, items: Sequence[Rows], num_logits: Sequence[int]) -> torch.Tensor:
        """Logits of the last num_logits[i] rows of each item, float32 [sum, width]."""
        return self.model.forward(build_batch(items, num_logits, self.cache.block_size), self.cache)

    def close(self) -> None:
        """Drop the copies in host memory."""
        self._host.clear()

    def _swap_out(self, swaps: Iterable[BlockSwap]) -> None:
        for swap in swaps:
            layers = [torch.stack([k[swap.device], v[swap.device]]) for k, v in self._layers()]
            self._host[swap.host] = torch.stack(layers).cpu()

    def _swap_in(self, swaps: Iterable[BlockSwap]) -> None:
        for swap in swaps:
            saved = self._host.pop(swap.host)
            for (k, v), layer in zip(self._layers(), saved, strict=True):
                k[swap.device] = layer[0]
                v[swap.device] = layer[1]

    def _layers(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.cache.key, self.cache.value, strict=True)
