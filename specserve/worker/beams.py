"""The best continuations of beams, scored as in transformers' beam search: options act on log probabilities.

Scores are the log_softmax of the model's logits; then come the options of worker/process.py in their order. What is
left is neither normalised again nor divided by a temperature, and there is no noise. What a row gives depends on its
logits, its request's options and its position, never on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specserve.core.plan import TokenLogprobs
from specserve.kernels.cpu.ops import log_softmax
from specserve.kernels.lazy import inference
from specserve.worker.logprobs import best_ids
from specserve.worker.process import apply_options
from specserve.worker.sampler import Logits, RowGroup, as_tensor, batches

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch


@inference
def continuations(logits: Logits, groups: Sequence[RowGroup], vocab_size: int) -> list[tuple[TokenLogprobs, ...]]:
    """For each group one entry a row: token_id -1, the best continuations in top_ids, best first, equal ones by id.

    There are so many that the best `beams` that end nothing are among them, and at least `logprobs`. Tokens that the
    options exclude are left out, so an entry may have fewer, or none.

    Args:
        logits: float32 [m, at least vocab_size]; not changed. Ids from vocab_size on are padding.
    """
    logits = as_tensor(logits)[:, :vocab_size]
    found: list[tuple[TokenLogprobs, ...]] = []
    for batch in batches(groups):
        rows = np.concatenate([np.arange(g.first, g.first + g.count) for g in batch])
        found += _continuations(logits.index_select(0, torch.from_numpy(rows)).contiguous(), batch)
    return found


def _continuations(logits: torch.Tensor, groups: Sequence[RowGroup]) -> list[tuple[TokenLogprobs, ...]]:
    """The rows of some groups, one after the other: float32 [n, V]."""
    scores = log_softmax(logits)
    wanted, begin = [], 0
    for g in groups:
        if g.edits:
            apply_options(scores[begin : begin + g.count], g.state, g.position, g.prefix, g.chain, g.mask)
        wanted.append(max(g.state.params.beams + len(g.state.end_ids), g.state.params.logprobs or 0))
        begin += g.count
    # One entry more than is wanted shows whether equal ones lie on both sides of the edge.
    tops = torch.topk(scores, min(max(wanted) + 1, scores.shape[1]))
    entries = [
        _entry(row, values, ids, count)
        for row, values, ids, count in zip(
            scores, tops.values.numpy(), tops.indices.numpy(), np.repeat(wanted, [g.count for g in groups]), strict=True
        )
    ]
    ends = np.cumsum([g.count for g in groups]).tolist()
    return [tuple(entries[end - g.count : end]) for g, end in zip(groups, ends, strict=True)]


def _entry(row: torch.Tensor, values: np.ndarray, ids: np.ndarray, count: int) -> TokenLogprobs:
    """Of one row float32 [V]: the `count` best finite ones, given the best in descending order."""
    count = min(count, int(np.isfinite(values).sum()))
    if 0 < count < len(values) and values[count - 1] == values[count]:
        ids = best_ids(row, count).numpy()
        values = row.numpy()[ids]
    else:
        order = np.lexsort((ids[:count], -values[:count]))
        ids, values = ids[order], values[order]
    return TokenLogprobs(-1, None, tuple(ids.tolist()), tuple(values.tolist()))
