"""Log probabilities of an emitted token and of the best ones at its position."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from specserve.core.plan import TokenLogprobs
from specserve.kernels.lazy import inference

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch


@inference
def token_logprobs(row: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """From the logits of one position, float32 [V]: log_softmax over it, the `count` best first, ties by id."""
    logprobs = torch.log_softmax(row, 0)
    best = best_ids(logprobs, count)
    return TokenLogprobs(
        token_id=token,
        logprob=_finite(float(logprobs[token])),
        top_ids=tuple(best.tolist()),
        top_logprobs=tuple(_finite(value) for value in logprobs[best].tolist()),
    )


def best_ids(row: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [count], ids of the largest entries, largest first, equal ones by id."""
    count = min(count, row.shape[0])
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    threshold = torch.topk(row, count, sorted=False).values.min()
    candidates = torch.nonzero(row >= threshold).flatten()
    order = torch.sort(row[candidates], descending=True, stable=True).indices
    return candidates[order[:count]]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
