"""top-k, top-p and min-p on one row of logits, float32 [V], changed in place. Ties fall to the lowest id.

One row at a time: no result depends on how many rows a step has. Each keeps at least the best token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

NEVER = float("-inf")


def top_k(row: torch.Tensor, k: int) -> None:
    """Keep the k best."""
    if k >= row.shape[0]:
        return
    threshold = torch.topk(row, k, sorted=False).values.min()
    spare = k - int((row > threshold).sum())
    equal = torch.nonzero(row == threshold).flatten()
    row.masked_fill_(row < threshold, NEVER)
    row[equal[spare:]] = NEVER


def top_p(row: torch.Tensor, p: float) -> None:
    """Keep the smallest set of best tokens whose probability reaches p (Holtzman et al. 2020, section 3.1)."""
    weight = torch.exp((row - row.max()).to(torch.float64))
    total = float(weight.sum())
    # Tokens under this bound hold less than 1 - p together, so the set is among the others: a short sort.
    candidates = torch.nonzero(weight >= total * (1.0 - p) / row.shape[0]).flatten()
    order = torch.sort(row[candidates], descending=True, stable=True).indices
    candidates = candidates[order]
    reached = torch.cumsum(weight[candidates], 0)
    keep = candidates[: int((reached < p * total).sum()) + 1]
    kept = row[keep]
    row.fill_(NEVER)
    row[keep] = kept


def min_p(row: torch.Tensor, p: float) -> None:
    """Keep tokens at least p times as likely as the best one (Nguyen et al. 2024, section 3)."""
    row.masked_fill_(row < row.max() + math.log(p), NEVER)


def truncate(row: torch.Tensor, *, k: int, p: float, smallest: float) -> None:
    """top-k, then top-p of what is left, then min-p. A row without a finite entry stays as it is."""
    if not bool(torch.isfinite(row.max())):
        return
    if k > 0:
        top_k(row, k)
    if p < 1.0:
        top_p(row, p)
    if smallest > 0.0:
        min_p(row, smallest)
